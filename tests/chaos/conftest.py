"""One world of services for all chaos tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

from chaos import Chaos, Proof, chaos_world

ITERATIONS = 6


@pytest.fixture(scope="session")
def chaos() -> Iterator[Chaos]:
    """The services, up."""
    with chaos_world(ITERATIONS) as world:
        yield world


@pytest.fixture(scope="session")
def undisturbed(chaos) -> Proof:
    """What the run leaves when nobody disturbs it."""
    chaos.train("calm")
    return Proof.of(chaos.store(), "calm")
