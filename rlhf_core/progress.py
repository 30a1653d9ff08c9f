"""What a worker counts while it works, so that others can tell whether it still moves."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Pulse:
    """A worker at one instant."""

    count: int
    """Grows with everything that the worker does."""
    doing: str | None
    """The call under way and what it counted last, for people; None: nobody has called."""
    longest: float | None = None
    """Seconds that the step under way took at most so far in this process; None: it was never finished before."""
    waiting: str | None = None
    """What is waited for, outside of the worker."""
    at_most: float | None = None
    """Seconds after which that wait ends by itself; None: it is the object store that is waited for."""


class Progress:
    """Counts steps. The working thread counts, any other may ask for the ``pulse``.

    A step goes from one count to the next one, or to the end of the call. Its kind is the call and what was counted last, so
    that the first micro-batch of a call, with all that comes before it, is another kind than those that follow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._count = 0
        self._call: str | None = None
        self._unit, self._units = "", 0
        self._since = clock()
        self._longest: dict[tuple[str | None, str], float] = {}
        self._waits: dict[int, tuple[str, float | None]] = {}
        self._tickets = itertools.count()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """The worker was called. Inside another call it does nothing."""
        if self._call is not None:
            yield
            return
        with self._lock:
            self._call, self._unit, self._units = name, "", 0
            self._move()
        try:
            yield
        finally:
            with self._lock:
                self._learn()
                self._call = None
                self._move()

    def count(self, unit: str) -> None:
        """One more ``unit`` of the call is done."""
        with self._lock:
            self._learn()
            self._units = self._units + 1 if unit == self._unit else 1
            self._unit = unit
            self._move()

    @contextmanager
    def waiting(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """The worker waits for something that is not its own work and ends by itself: after ``seconds`` at most, or, for
        None, as an outage of the object store does. Several threads may wait at once."""
        ticket = next(self._tickets)
        with self._lock:
            self._waits[ticket] = what, seconds
            self._move()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[ticket]
                self._move()

    def pulse(self) -> Pulse:
        """The worker now."""
        with self._lock:
            if self._call is None:
                return Pulse(self._count, None)
            what, seconds = next(iter(self._waits.values()), (None, None))
            done = f", after {self._units} x {self._unit}" if self._unit else ""
            return Pulse(self._count, f"{self._call}{done}", self._longest.get(self._kind), what, seconds)

    @property
    def _kind(self) -> tuple[str | None, str]:
        return self._call, self._unit

    def _learn(self) -> None:
        """The step under way ends now. One that was waited in says nothing about how long it normally takes."""
        if not self._waits:
            self._longest[self._kind] = max(self._longest.get(self._kind, 0.0), self._clock() - self._since)

    def _move(self) -> None:
        self._count += 1
        self._since = self._clock()
