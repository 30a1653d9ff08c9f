"""What all tests share: tests marked ``gpu`` are skipped, and so counted, where there is no CUDA device, and those marked
``slow`` unless RLHF_SLOW_TESTS=1."""

from __future__ import annotations

import os
import shutil

import pytest


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


def cuda_is_there() -> bool:
    if shutil.which("nvidia-smi") is None:  # spares the import of torch
        return False
    import torch

    return torch.cuda.is_available()
