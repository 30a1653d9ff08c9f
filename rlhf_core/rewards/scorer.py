"""Scoring rows with the functions of a configuration: the one way to user code, for the trial and for the workers."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlhf_core.config.data import RewardConfig, RewardFunctionConfig
from rlhf_core.errors import RewardError
from rlhf_core.progress import Progress
from rlhf_core.rewards.calling import describe_rows
from rlhf_core.rewards.contract import Answer
from rlhf_core.rewards.host import START_SECONDS, Conditions, HostEnded, HostLate, RewardHost
from rlhf_core.rewards.loading import ARGUMENTS
from rlhf_core.rewards.messages import Call, Load, Reply
from rlhf_core.rewards.scoring import ScoredBatch, combine

logger = logging.getLogger(__name__)

#: Pause before rows are asked again; it doubles each time, up to the longest.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


@dataclass(frozen=True)
class Rows:
    """N rows to score, as parallel lists of length N."""

    sample_ids: list[str]
    prompts: list[str]
    completions: list[str]
    answers: list[str | None]
    metadata: list[dict[str, Any]]
    completion_ids: list[list[int]]
    """Token ids of the responses."""
    finish_reasons: list[str]
    """``stop`` or ``length``."""

    def columns(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, list[Any]]:
        """These columns of these rows."""
        return {name: [getattr(self, name)[row] for row in rows] for name in names}


def component_name(function: RewardFunctionConfig) -> str:
    """Name of the function's component: its own, or that of the attribute."""
    return function.name or function.function.rpartition(":")[2]


class Scorer:
    """The functions of a configuration in their hosts. Not for several threads; ``close`` it.

    Functions whose files lie in one folder share a host, so that modules beside them are imported once, and namesakes in other
    folders are not mistaken for them.
    """

    def __init__(self, config: RewardConfig, conditions: Conditions, progress: Progress | None = None) -> None:
        self.config, self.conditions, self.progress = config, conditions, progress or Progress()
        self.names = [component_name(f) for f in config.functions]
        self._hosts: dict[str, RewardHost] = {}
        self._asks_for: dict[str, tuple[str, ...]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def is_current(self) -> bool:
        """Whether all hosts live and no file that they imported has changed since."""
        return all(host.is_current() for host in self._hosts.values())

    def load(self) -> set[str]:
        """Start the hosts and import all functions; the optional arguments that any of them asks for. RewardError."""
        for function in self.config.functions:
            self._host(_folder(function))
        return {name for names in self._asks_for.values() for name in names}

    def score(self, rows: Rows) -> ScoredBatch:
        """The combined ``answers``."""
        weights = {component_name(f): f.weight for f in self.config.functions}
        return combine(self.answers(rows), weights, rows.sample_ids, self.config.clip)

    def answers(self, rows: Rows) -> dict[str, list[Answer]]:
        """What each function says of all rows, asked `reward.batch_size` at a time. RewardError for what a function breaks.

        Rows of `failed_infra` are asked again, only of the function that failed, `reward.retries` times.
        """
        everything = range(len(rows.sample_ids))
        answers: dict[str, list[Answer]] = {name: [None] * len(everything) for name in self.names}
        for function in self.config.functions:
            self._ask(function, rows, everything, answers[component_name(function)])
        for attempt in range(self.config.retries):
            failed = {
                component_name(f): [n for n in everything if _failed(answers[component_name(f)][n])]
                for f in self.config.functions
            }
            if not any(failed.values()):
                break
            self._rest(attempt, failed)
            for function in self.config.functions:
                name = component_name(function)
                self._ask(function, rows, failed[name], answers[name])
        return answers

    def _rest(self, attempt: int, failed: dict[str, list[int]]) -> None:
        # Jitter: workers that failed together do not come back together.
        pause = min(_PAUSE_SECONDS * 2**attempt, _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.5)
        counts = ", ".join(f"{name} for {len(rows)} rows" for name, rows in failed.items() if rows)
        logger.warning("failed_infra from %s: asking again in %.1f s", counts, pause)
        with self.progress.waiting("rewards that failed, to ask for them again", pause):
            time.sleep(pause)

    def _ask(self, function: RewardFunctionConfig, rows: Rows, wanted: Sequence[int], into: list[Answer]) -> None:
        """Ask about the rows ``wanted``, in batches, and put the answers in their places."""
        name = component_name(function)
        for first in range(0, len(wanted), self.config.batch_size):
            part = wanted[first : first + self.config.batch_size]
            for row, answer in zip(part, self._call(function, name, rows, part), strict=True):
                into[row] = answer
            self.progress.count("batch of rows")

    def _call(self, function: RewardFunctionConfig, name: str, rows: Rows, part: Sequence[int]) -> list[Answer]:
        folder, samples = _folder(function), [rows.sample_ids[row] for row in part]
        where = f"on {describe_rows(samples)}"
        for again in (True, False):
            host = self._host(folder)
            request = Call(name, rows.columns((*ARGUMENTS, *self._asks_for[name]), part), samples)
            try:
                with self.progress.waiting(f"reward function {name!r}", self.config.timeout_seconds):
                    return self._value(host.ask(request, self.config.timeout_seconds))
            except HostLate:
                raise self._late(
                    name,
                    where,
                    f"make it faster, raise the limit, or lower reward.batch_size = {self.config.batch_size}",
                ) from None
            except HostEnded as error:
                if not (again and error.from_outside):
                    raise self._ended(name, where, error) from None
                logger.warning("the process of reward function %r was killed %s: asking once more", name, where)
        raise AssertionError("the second round returns or raises")

    def _host(self, folder: str) -> RewardHost:
        """The host of a folder, with its functions imported; a new one in place of one that has ended."""
        host = self._hosts.get(folder)
        if host is None or host.closed:
            host = self._start(folder)
            try:
                self._import(host, [f for f in self.config.functions if _folder(f) == folder])
            except BaseException:
                host.close()
                raise
            self._hosts[folder] = host
        return host

    def _start(self, folder: str) -> RewardHost:
        try:
            with self.progress.waiting("the process for reward functions", START_SECONDS):
                return RewardHost(self.conditions, folder)
        except OSError as error:
            raise RewardError(
                f"the process for reward functions cannot be started in the folder {self.conditions.folder!r} of the run: "
                f"{error}. Every node needs that folder"
            ) from None
        except (HostEnded, HostLate) as error:
            how = error.how if isinstance(error, HostEnded) else "no sign of life"
            raise RewardError(
                f"the process for reward functions did not start ({how}): the log says what it printed"
            ) from None

    def _import(self, host: RewardHost, functions: Sequence[RewardFunctionConfig]) -> None:
        for function in functions:
            name, where = component_name(function), f"while {function.function!r} was imported"
            try:
                request = Load(name, function.function, dict(function.options))
                with self.progress.waiting(f"reward function {name!r} to be imported", self.config.timeout_seconds):
                    self._asks_for[name] = self._value(host.ask(request, self.config.timeout_seconds))
            except HostLate:
                raise self._late(name, where, "make it faster, or raise the limit") from None
            except HostEnded as error:
                raise self._ended(name, where, error) from None

    def _value(self, reply: Reply) -> Any:
        if reply.error is not None:
            raise RewardError(self._explained(reply.error))
        return reply.value

    def _late(self, name: str, where: str, advice: str) -> RewardError:
        return RewardError(
            f"reward function {name!r} gave no answer within {self.config.timeout_seconds:g} s (reward.timeout_seconds) "
            f"{where}; its process was ended: {advice}"
        )

    def _ended(self, name: str, where: str, error: HostEnded) -> RewardError:
        memory = ", as when memory runs out" if error.from_outside else ""
        return RewardError(f"reward function {name!r} ended its process ({error.how}{memory}) {where}")

    def _explained(self, message: str) -> str:
        """With a hint if the message names a variable that the driver has and the function does not."""
        missing = sorted(word for word in set(re.findall(r"\w+", message)) & self.conditions.withheld if word.isupper())
        if not missing:
            return message
        names = ", ".join(f'"{name}"' for name in missing)
        return (
            f"{message}. {missing[0]} is set here, but reward functions see only the variables that "
            f"reward.environment names: reward.environment = [{names}]"
        )


def _failed(answer: Answer) -> bool:
    return answer is not None and answer.status == "failed_infra"


def _folder(function: RewardFunctionConfig) -> str:
    origin = function.function.rpartition(":")[0]
    return str(Path(origin).expanduser().absolute().parent) if origin.endswith(".py") else ""
