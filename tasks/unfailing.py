"""What only shows a run must not stop it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging import get_run_logger


@contextmanager
def only_warns(what: str) -> Iterator[None]:
    """Turn an error of the body into a warning: trackers and the Prefect server show what the store knows."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # a boundary: anything that a tracker, its network or a server may raise
        get_run_logger().warning("%s: %s: %s", what, type(error).__name__, error)
