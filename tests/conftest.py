"""What all tests share: tests marked ``gpu`` are skipped, and so counted, where there is no CUDA device, and those marked
``slow`` unless RLHF_SLOW_TESTS=1."""

from __future__ import annotations

import os
import shutil

import pytest


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
