"""What all tests share.

Tests marked ``gpu`` are skipped, and so counted, where there is no CUDA device, and those marked ``slow`` unless
RLHF_SLOW_TESTS=1. `make test` has two processes, each of which takes one of the groups below after the other.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

#: End-to-end tests that compare with the reference run. The others have services of their own.
COMPARE = ("branches_and_guards", "cancel", "kill_and_continue", "stores_and_drivers", "train_to_the_end")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Folder with SmolLM2's tokenizer and chat template; reading it from the package takes seconds. Not to be changed."""
    from rlhf_core.testing.tiny_model import tiny_tokenizer_folder

    return tiny_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def pytest_collection_modifyitems(items):
    if os.environ.get("RLHF_SLOW_TESTS") != "1":
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: set RLHF_SLOW_TESTS=1"))
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not cuda_is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def group_of(path: Path) -> str:
    """Name of the tests that run one after the other in one process: those of a module, or those that share services."""
    folder, module = path.parts[-2], path.stem.removeprefix("test_")
    if folder == "e2e":
        return "e2e, compared with the reference" if module in COMPARE else "e2e"
    return folder if folder in ("integration", "chaos", "gpu") else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(Path(nodeid.split("::")[0]))

    return Groups(config, log)


def cuda_is_there() -> bool:
    if shutil.which("nvidia-smi") is None:  # spares the import of torch
        return False
    import torch

    return torch.cuda.is_available()
