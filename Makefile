# `make train` and `make test` on a bare Linux machine: Python 3.11 or 3.12 with pip, and a C++ compiler.
# Both first make the environment .venv from a fully pinned list; once it is there, that costs nothing.

PRESET ?= laptop
ARGS ?=
LOCK ?= cpu
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
LOCK_FILE := requirements/$(LOCK).txt
# The environment's state is a file named after what it was made from, so a change of the list makes it anew.
STATE := $(shell cat $(LOCK_FILE) pyproject.toml | cksum | tr ' ' '-')
READY := $(VENV)/.ready-$(LOCK)-$(STATE)
UNFINISHED := $(VENV)/.unfinished
MADE := $(VENV)/.made-by-make
IN_RANGE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
# A GPU machine brings its own PyTorch, for its own python3.
PYTHONS := $(or $(PYTHON),$(if $(filter gpu,$(LOCK)),python3 python3.12,python3.11 python3.12 python3))
VENV_FLAGS := $(if $(filter gpu,$(LOCK)),--system-site-packages)
# Tools that are called by name (ninja by DeepSpeed, weed by the tests) are those of the environment.
RUN := PATH="$(abspath $(BIN)):$$PATH" TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help env train test lint unit docs clean

help:
	@echo 'make train   train the preset PRESET=laptop with the options ARGS="--set iterations=5"'
	@echo 'make test    everything that CI checks: lint, then all tests'
	@echo 'make lint    format, ruff, mypy, import contracts'
	@echo 'make unit    the unit tests alone'
	@echo 'make docs    write docs/configuration.md anew from the configuration model'
	@echo 'make env     only make the environment (PYTHON=python3.12 chooses the interpreter, LOCK=gpu the list)'
	@echo 'make clean   end the local services, remove the environment and caches; runs below .rlhf stay'

env: $(READY)

train: $(READY)
	$(RUN) rlhf train $(PRESET) $(ARGS)

# Much of a test is waiting for a process to start: two at a time use both cores of a small machine.
test: lint
	$(RUN) python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder

lint: $(READY)
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports

unit: $(READY)
	$(RUN) python -m pytest tests/unit

docs: $(READY)
	$(RUN) python docs/generate_configuration.py

# An environment whose installation was interrupted is made anew (the mark is still there), and so is one of another list.
# One that was not made here, as VENV may name, is only added to, never cleared.
$(READY):
	@set -eu; \
	make=no; \
	if [ ! -e $(VENV) ]; then make=yes; fi; \
	if [ -e $(MADE) ]; then \
	  other=$$(ls $(VENV)/.ready-* 2>/dev/null | grep -v -e '/.ready-$(LOCK)-' || true); \
	  if [ -e $(UNFINISHED) ] || [ -n "$$other" ] || ! $(BIN)/python -c '$(IN_RANGE)' 2>/dev/null; then make=yes; fi; \
	fi; \
	if [ $$make = yes ]; then \
	  python=; \
	  for name in $(PYTHONS); do \
	    if "$$name" -c '$(IN_RANGE)' 2>/dev/null; then python=$$name; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo 'No Python 3.11 or 3.12 with venv and pip among: $(PYTHONS).' >&2; \
	    echo 'Install one (on Debian also its python3-venv), or name it: make PYTHON=/path/to/python3.12 ...' >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$python ($$("$$python" --version))"; \
	  rm -rf $(VENV); \
	  mkdir -p $(VENV); \
	  touch $(MADE) $(UNFINISHED); \
	  "$$python" -m venv $(VENV_FLAGS) $(VENV); \
	fi; \
	touch $(UNFINISHED); \
	echo 'installing the packages of $(LOCK_FILE): one to three minutes the first time'; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r $(LOCK_FILE) || { \
	  echo 'The packages could not be installed. If it is torch+cpu that was not found: CONTRIBUTING.md, "Setting up".' >&2; \
	  exit 1; \
	}; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	rm -f $(VENV)/.ready-* $(UNFINISHED); \
	touch $@

clean:
	@if [ -e .rlhf/stack.json ] && [ -x $(BIN)/rlhf ]; then $(BIN)/rlhf down; fi
	@if [ -e $(MADE) ]; then rm -rf $(VENV); else echo '$(VENV) was not made by make: it stays'; fi
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
