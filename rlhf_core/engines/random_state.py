"""Torch's random numbers of this process, saved and restored."""

from __future__ import annotations

from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """State of torch's generators of this process, as tensors."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on with the random numbers where ``random_state`` was taken."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
