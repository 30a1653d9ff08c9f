"""What all tests share.

Tests marked ``gpu`` are skipped, and so counted, where there is no CUDA device, and those marked ``slow`` unless
RLHF_SLOW_TESTS=1. `make test` has two processes, each of which takes one of the groups below after the other.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

#: Fixtures of the session that cost most: their users run in one process, in which such a fixture is made once.
COSTLY = ("reference", "whole_world", "chaos")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Folder with SmolLM2's tokenizer and chat template; reading it from the package takes seconds. Not to be changed."""
    from rlhf_core.testing.tiny_model import tiny_tokenizer_folder

    return tiny_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    users = {}
    for item in items:
        users.setdefault(item.path, set()).update(item.fixturenames)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.path, users[item.path])))
    if os.environ.get("RLHF_SLOW_TESTS") != "1":
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: set RLHF_SLOW_TESTS=1"))
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not cuda_is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def group_of(path: Path, fixtures: set[str]) -> str:
    """Name of the tests that run one after the other in one process: those of a module, or those that share something."""
    for name in COSTLY:
        if name in fixtures:
            return name
    folder = path.relative_to(TESTS).parts[0]
    return folder if folder == "integration" else path.stem


def cuda_is_there() -> bool:
    if shutil.which("nvidia-smi") is None:  # spares the import of torch
        return False
    import torch

    return torch.cuda.is_available()
