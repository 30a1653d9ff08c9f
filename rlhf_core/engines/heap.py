"""The C library's heap: it keeps what was freed, which on a CPU is everything that a pass over the model left behind."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give the free pages of this process's heap back to the system. Nothing where the C library is not glibc.

    A forward and backward pass leave more than a gigabyte of holes between the tensors that live on; without this they
    stay, and grow with every iteration, while another process computes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
