"""What all tests share: tests marked ``gpu`` are skipped, and so counted, where there is no CUDA device."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items):
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not cuda_is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def cuda_is_there() -> bool:
    if shutil.which("nvidia-smi") is None:  # spares the import of torch
        return False
    import torch

    return torch.cuda.is_available()
