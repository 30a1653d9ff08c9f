# `make train` and `make test` on a bare Linux machine: Python 3.11 or 3.12 with pip, and a C++ compiler.
# Both first make the environment .venv from a fully pinned list; once it is there, that costs nothing.

PRESET ?= laptop
ARGS ?=
LOCK ?= cpu
VENV ?= .venv

BIN := $(VENV)/bin
LOCK_FILE := requirements/$(LOCK).txt
# The environment's state is a file named after what it was made from, so a change of the list makes it anew.
STATE := $(shell cat $(LOCK_FILE) pyproject.toml | cksum | tr ' ' '-')
READY := $(VENV)/.ready-$(STATE)
UNFINISHED := $(VENV)/.unfinished
IN_RANGE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
# A GPU machine brings its own PyTorch.
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

test: lint
	$(RUN) python -m pytest

lint: $(READY)
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports

unit: $(READY)
	$(RUN) python -m pytest tests/unit

docs: $(READY)
	$(RUN) python docs/generate_configuration.py

# An environment whose installation was interrupted is not trusted: the mark is still there, and it is made anew.
$(READY):
	@set -eu; \
	if [ -e $(UNFINISHED) ] || ! $(BIN)/python -c '$(IN_RANGE)' 2>/dev/null; then \
	  python=; \
	  for name in $(or $(PYTHON),python3.11 python3.12 python3); do \
	    if "$$name" -c '$(IN_RANGE)' 2>/dev/null; then python=$$name; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo 'No Python 3.11 or 3.12 with venv and pip among: $(or $(PYTHON),python3.11 python3.12 python3).' >&2; \
	    echo 'Install one (on Debian also its python3-venv), or name it: make PYTHON=/path/to/python3.12 ...' >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$python ($$("$$python" --version))"; \
	  "$$python" -m venv --clear $(VENV_FLAGS) $(VENV); \
	fi; \
	touch $(UNFINISHED); \
	echo 'installing the packages of $(LOCK_FILE): one to three minutes the first time'; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r $(LOCK_FILE); \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	rm -f $(VENV)/.ready-* $(UNFINISHED); \
	touch $@

clean:
	@if [ -e .rlhf/stack.json ] && [ -x $(BIN)/rlhf ]; then $(BIN)/rlhf down; fi
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
