"""Importing is free: what a module loads is measured in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Loaded by actors only, on the machine that needs them.
HEAVY = {"torch", "vllm", "deepspeed", "transformers", "datasets"}
CLUSTER = {"prefect", "ray"}


def loaded(unwanted: set[str], *modules: str) -> list[str]:
    """Which of the unwanted packages are in ``sys.modules`` after the modules were imported, one after the other."""
    program = f"import {', '.join(modules)}; import sys; print(*{unwanted!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split())


@pytest.fixture(scope="module")
def names(modules):
    """Function: package -> dotted names of all its modules."""

    def all_of(package: str) -> list[str]:
        dotted = [".".join(file.with_suffix("").parts) for file in modules if file.parts[0] == package]
        return [name.removesuffix(".__init__") for name in dotted]

    return all_of


def test_deploying_the_flow_loads_no_model_library():
    # `prefect deploy` and every worker import this module.
    assert loaded(HEAVY, "flows.train_rlhf") == []


def test_no_task_module_loads_a_model_library(names):
    assert loaded(HEAVY, *names("tasks")) == []


def test_infra_loads_neither_models_nor_the_cluster_nor_s3(names):
    # ray_probe is a program: it is the connection to Ray.
    modules = [name for name in names("infra") if name != "infra.services.ray_probe"]
    assert loaded(HEAVY | CLUSTER | {"s3fs", "botocore", "pyarrow"}, *modules) == []


@pytest.mark.parametrize("module", ["rlhf_core", "rlhf_core.config", "rlhf_core.errors", "rlhf_core.manifests"])
def test_the_light_end_of_the_core_is_light(module):
    assert loaded(HEAVY | CLUSTER | {"numpy", "pyarrow"}, module) == []


def test_the_command_line_starts_light():
    assert loaded(HEAVY | CLUSTER | {"numpy", "pyarrow", "pydantic"}, "flows.cli.main") == []


def test_bad_input_is_found_without_the_cluster():
    assert loaded(HEAVY | CLUSTER, "tasks.preflight") == []


@pytest.mark.parametrize("package", ["rlhf_core.actors", "rlhf_core.engines", "rlhf_core.algorithms"])
def test_a_package_is_a_name_only(package):
    assert loaded(HEAVY | CLUSTER | {"numpy", "pyarrow"}, package) == []
