"""Finds workers that hang: those that do not answer, and those that answer but make no step.

The driver asks every worker that it waits for, every few seconds, beside the running call. How long a worker may stand still
depends on what it does (``Patience``). Only the time in which this process was awake counts: when the whole machine was
paused, nobody is blamed for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.progress import Pulse

logger = logging.getLogger(__name__)

#: Concurrency group of the calls that must not wait for work.
CONTROL_GROUP = "control"

#: Seconds between two questions.
POLL_SECONDS = 2.0

#: A step may take so many times what the longest one of its kind has taken.
_NORMAL = 5.0

#: A pause of this process that is longer than so many polls was none of waiting, but of being stopped.
_AWAKE_POLLS = 3.0


@dataclass(frozen=True)
class Patience:
    """How long a worker may stand still, in seconds."""

    stall: float
    """At least so long, whatever it does."""
    first: float
    """A step that it has never finished before (compiling, capturing graphs, filling caches), and at most for any step."""
    outage: float
    """What the object store may need to come back."""

    def silence(self, last: Pulse | None) -> float:
        """Seconds without an answer. A step that normally takes long may also keep the worker from answering."""
        longest = last.longest if last is not None and last.longest is not None else 0.0
        return max(self.stall, min(_NORMAL * longest, self.first))

    def standstill(self, pulse: Pulse) -> float:
        """Seconds without a step of a worker that answers."""
        if pulse.waiting is not None:
            return self.stall + (self.outage + self.first if pulse.at_most is None else pulse.at_most)
        if pulse.longest is None:
            return max(self.stall, self.first)
        return self.silence(pulse)


class AwakeTime:
    """Seconds that this process was awake between the calls of ``read``, which come every few seconds while it is."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, longest: float = _AWAKE_POLLS * POLL_SECONDS
    ) -> None:
        self._clock, self._longest = clock, longest
        self._last, self._total = clock(), 0.0

    def read(self) -> float:
        """Seconds so far; never goes back, and jumps by no more than ``longest``."""
        now = self._clock()
        self._total += min(max(0.0, now - self._last), self._longest)
        self._last = now
        return self._total


class Vigil:
    """What is known of one worker. Times are those of an ``AwakeTime``."""

    def __init__(self, now: float) -> None:
        self.last: Pulse | None = None
        self.answered = self.moved = now

    def hear(self, pulse: Pulse, now: float) -> None:
        """It has answered. A worker that nobody has called does not stand still."""
        if self.last is None or pulse.count != self.last.count or pulse.doing is None:
            self.moved = now
        self.last, self.answered = pulse, now

    def complaint(self, now: float, patience: Patience) -> str | None:
        """Why it counts as dead, for people; None while it does not."""
        silent, still = now - self.answered, now - self.moved
        if silent > patience.silence(self.last):
            return f"has not answered for {silent:.0f} s{self._at()}"
        if self.last is not None and still > patience.standstill(self.last) and silent <= POLL_SECONDS * _AWAKE_POLLS:
            return f"answers, but has not moved for {still:.0f} s{self._at()}"
        return None

    def is_silent(self, now: float, patience: Patience) -> bool:
        """Whether it does not answer, though not for long enough yet to count as dead."""
        return now - self.answered > patience.stall / 2

    def _at(self) -> str:
        if self.last is None or self.last.doing is None:
            return ""
        waits = f" and waits for {self.last.waiting}" if self.last.waiting is not None else ""
        return f"; it was in {self.last.doing}{waits}"


class Watch:
    """Asks workers for their pulse. ``handles`` by name."""

    def __init__(self, handles: Mapping[str, Any], epoch: int, patience: Patience) -> None:
        self._epoch, self._patience = epoch, patience
        # An actor that an older release of the project made cannot be asked.
        self._handles = {name: handle for name, handle in handles.items() if hasattr(handle, "pulse")}
        self._time = AwakeTime()
        self._asked_at = self._time.read()
        self._vigils = {name: Vigil(self._asked_at) for name in self._handles}
        self._questions: dict[str, Any] = {}

    def leave(self, name: str) -> None:
        """Nobody waits for this one any more."""
        self._vigils.pop(name, None)
        self._questions.pop(name, None)

    def end(self, name: str) -> None:
        """End a worker that hangs. Ray does it by signal where the process does not listen any more."""
        import ray

        ray.kill(self._handles[name])
        self.leave(name)

    def look(self) -> dict[str, str]:
        """Ask, if it is time to, and say which workers count as dead and why: those first that do not answer."""
        now = self._time.read()
        if now - self._asked_at < min(POLL_SECONDS, self._patience.stall / 4):
            return {}
        self._asked_at = now
        self._listen(now)
        for name in self._vigils.keys() - self._questions.keys():
            pulse = self._handles[name].pulse.options(concurrency_group=CONTROL_GROUP)
            self._questions[name] = pulse.remote(self._epoch)
        by_silence = sorted(self._vigils.items(), key=lambda item: item[1].answered)
        found = {name: vigil.complaint(now, self._patience) for name, vigil in by_silence}
        dead = {name: complaint for name, complaint in found.items() if complaint is not None}
        return {name: complaint + self._silent_too(dead, now) for name, complaint in dead.items()}

    def _listen(self, now: float) -> None:
        import ray
        from ray.exceptions import RayError

        if not self._questions:
            return
        asked = {question: name for name, question in self._questions.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for question in answered:
            name = asked[question]
            del self._questions[name]
            try:
                self._vigils[name].hear(ray.get(question), now)
            except RayError as error:
                # It is dead, or another driver's: the call that is waited for says so itself.
                logger.info("%s is not watched any more: %s", name, str(error).strip().splitlines()[0])
                self.leave(name)

    def _silent_too(self, dead: Mapping[str, str], now: float) -> str:
        """In a collective all stand still because of one: name those that may be the one."""
        silent: Sequence[str] = [
            name for name, v in self._vigils.items() if name not in dead and v.is_silent(now, self._patience)
        ]
        return f" ({', '.join(silent)} does not answer either)" if silent else ""
