"""The fence: an actor serves the newest driver only.

A driver that was declared dead may still run. Its lease epoch is older than that of its successor, who claimed the actors;
so every call carries the epoch, and a call of an older one is refused before it does anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from rlhf_core.actors.failures import leaves_doubt
from rlhf_core.actors.one_thread import CONTROL
from rlhf_core.errors import FencedOut
from rlhf_core.progress import Progress, Pulse


class Fenced:
    """Base of all actors. ``progress``: what is under way; every public call of a subclass is noted there."""

    name: str
    _doubt: tuple[str, str] | None = None
    """The call that failed last in a way that may have broken the process, and its error; None since it has succeeded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.progress = Progress()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if callable(method) and not name.startswith("_") and name not in CONTROL:
                setattr(cls, name, _noted(name, method))

    def claim(self, epoch: int) -> dict[str, Any]:
        """Take the actor over for the driver with this lease epoch; returns ``status``. FencedOut for an older driver."""
        if epoch < self.epoch:
            raise FencedOut(
                f"{self.name} belongs to lease epoch {self.epoch}; epoch {epoch} was replaced and must stop"
            )
        self.epoch = epoch
        return self.status()

    def settle(self, epoch: int) -> None:
        """Return when the call that is under way has ended: calls run one after another, ``claim`` and ``status`` beside them."""
        self.require_epoch(epoch)

    def require_epoch(self, epoch: int) -> None:
        """FencedOut unless the call comes from the driver that claimed the actor."""
        if epoch != self.epoch:
            raise FencedOut(f"{self.name} belongs to lease epoch {self.epoch}; the call came from epoch {epoch}")

    def pulse(self, epoch: int) -> Pulse:
        """What the actor does now; answers beside a running call."""
        self.require_epoch(epoch)
        return self.progress.pulse()

    def status(self) -> dict[str, Any]:
        """What the actor is and holds. ``doubt``: why it is not to be trusted any more, None if nothing speaks against it."""
        return {
            "name": self.name,
            "pid": os.getpid(),
            "epoch": self.epoch,
            "doubt": None if self._doubt is None else f"{self._doubt[0]} failed with {self._doubt[1]}",
        }


def _noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.progress.call(name):
            try:
                result = method(self, *args, **kwargs)
            except Exception as error:
                if leaves_doubt(error):
                    self._doubt = (name, f"{type(error).__name__}: {error}")
                raise
        if self._doubt is not None and self._doubt[0] == name:
            self._doubt = None
        return result

    return call
