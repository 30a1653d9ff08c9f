"""What an audit found wrong, and what it can be rebuilt from."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rlhf_core import layout
from rlhf_core.errors import CorruptObject, UserError
from rlhf_core.manifests import STAGES
from rlhf_core.ports import ObjectStore
from rlhf_core.views import Damage

Kind = Literal["missing", "damaged", "inconsistent"]

#: Stages whose rows a replay of the update reads, and the manifest that holds its digest.
_REPLAYED = ("generate", "score", "advantages", "update")
_INTACT = {
    "generate": "rollouts come only from generating again",
    "score": "the rollouts are intact",
    "advantages": "rollouts and rewards are intact",
    "update": "rollouts, rewards and experience are intact",
    "sync": "the update is intact",
    "commit": "the stages are intact",
}


@dataclass(frozen=True)
class Finding:
    """One damaged object. What it belongs to decides what it can be rebuilt from."""

    key: str
    kind: Kind
    problem: str
    iteration: int | None = None
    stage: str | None = None
    checkpoint: int | None = None
    """Policy version of a checkpoint."""
    export: int | None = None
    """Policy version of an export."""
    remedy: str = ""
    """Where none of the above tells."""


@dataclass
class Findings:
    """What was found so far. Threads may add."""

    store: ObjectStore
    found: list[Finding] = field(default_factory=list)
    damaged: dict[int, set[str]] = field(default_factory=dict)
    """Iteration -> stages whose record or shards are damaged."""
    _known: set[tuple[str, str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, finding: Finding) -> None:
        """Note a finding; the same problem of the same object counts once."""
        with self._lock:
            if (finding.key, finding.problem) not in self._known:
                self._known.add((finding.key, finding.problem))
                self.found.append(finding)
                if finding.iteration is not None and finding.stage is not None:
                    self.damaged.setdefault(finding.iteration, set()).add(finding.stage)

    def guard(self, key: str, read: Callable[[], object], make: Callable[[Kind, str], Finding]) -> bool:
        """Whether ``read`` works; a CorruptObject becomes a finding. What a newer version wrote is refused."""
        try:
            read()
        except CorruptObject as error:
            kind: Kind = "damaged" if self.store.exists(key) else "missing"
            self.add(make(kind, _without_key(str(error), key, self.store.url)))
            return False
        except UserError:
            raise
        except ValueError as error:  # a record that was written by hand names what cannot be a key or a table
            self.add(make("damaged", _without_key(str(error), key, self.store.url)))
            return False
        return True


def _without_key(problem: str, key: str, url: str) -> str:
    """The message without the object's name, which stands beside it."""
    for name in (f"{key!r} in {url} ", f"{key} in {url} ", f"{key!r} in {url}: ", f"{key} ", f"{key}: "):
        if problem.startswith(name):
            return problem.removeprefix(name)
    return problem


@dataclass
class Remedies:
    """Turns findings into advice, once everything was looked at."""

    run: str
    done: int = 0
    """Finished iterations."""
    reached: int = 0
    """Policy version after the last committed update."""
    planned: int = 0
    damaged: dict[int, set[str]] = field(default_factory=dict)
    """Iteration -> stages whose record or shards are damaged."""
    retired: set[int] = field(default_factory=set)
    """Iterations whose rows were deleted on purpose."""
    checkpoints: list[int] = field(default_factory=list)
    """Intact ones, ascending."""

    def __post_init__(self) -> None:
        broken = {k for k, stages in self.damaged.items() if stages & set(_REPLAYED)}
        self._gaps = sorted(broken | self.retired)
        self._name = layout.run_name(self.run)

    def damage(self, finding: Finding) -> Damage:
        """The finding with its remedy."""
        if finding.checkpoint is not None:
            remedy = self._checkpoint(finding.key, finding.checkpoint)
        elif finding.export is not None:
            remedy = self._export(finding.key, finding.export)
        elif finding.stage is not None and finding.iteration is not None:
            remedy = self._stage(finding.iteration, finding.stage, finding)
        else:
            remedy = finding.remedy
        return Damage(
            key=finding.key,
            kind=finding.kind,
            iteration=finding.iteration,
            stage=finding.stage,
            problem=finding.problem,
            remedy=remedy,
        )

    def _stage(self, iteration: int, stage: str, finding: Finding) -> str:
        up_to = STAGES[: STAGES.index(stage) + 1]
        first = next(name for name in up_to if name == stage or name in self.damaged.get(iteration, ()))
        last = iteration >= self.done - 1
        if first == "commit" and last:
            delete = f"delete {finding.key}, then " if finding.kind != "missing" else ""
            return f"{_INTACT[first]}: {delete}`rlhf resume {self._name}` commits the iteration again"
        why = _INTACT[first] if first == stage else f"its input, stage {first}, is damaged too"
        begin = "sync" if first == "commit" else first  # a rerun cannot begin with the commit alone
        copy = "take it from a copy of the store, or " if first == "commit" else ""
        advice = f"{why}: {copy}`rlhf rerun {self._name} --iteration {iteration} --from {begin}`"
        if not last:
            advice += " (later iterations are then made again)"
        needed = iteration + 1 if first in ("sync", "commit") else iteration
        gap = self._gap_before(needed)
        if gap is not None:
            return f"policy version {needed} cannot be restored ({gap}): only a copy of the store helps"
        return f"{advice}{self._needed(iteration, stage)}"

    def _needed(self, iteration: int, stage: str) -> str:
        """Whether going on needs the object."""
        if stage not in _REPLAYED or iteration >= self.reached:
            return ""
        behind = [version for version in self.checkpoints if version > iteration]
        if behind:
            return f"; going on does not need it, since the checkpoint of policy version {behind[-1]} comes after it"
        return f"; `rlhf resume {self._name}` cannot replay this iteration without it"

    def _gap_before(self, version: int) -> str | None:
        """Why a policy version cannot be restored: what is missing between the newest checkpoint and it. None if it can."""
        start = max((c for c in self.checkpoints if c <= version), default=0)
        at = bisect_left(self._gaps, start)
        if at == len(self._gaps) or self._gaps[at] >= version:
            return None
        gap = self._gaps[at]
        reason = "is damaged" if self.damaged.get(gap, set()) & set(_REPLAYED) else "is retired"
        return f"iteration {gap} {reason}, and no intact checkpoint lies between it and version {version}"

    def _checkpoint(self, key: str, version: int) -> str:
        newer = [c for c in self.checkpoints if c > version]
        if newer:
            return f"nothing needs it: the checkpoint of policy version {newer[-1]} is newer and intact"
        gap = self._gap_before(version)
        if gap is not None:
            return f"it cannot be rebuilt: {gap}; only a copy of the store helps"
        start = max((c for c in self.checkpoints if c <= version), default=0)
        source = f"the checkpoint of policy version {start}" if start else "the starting model"
        # A resume leaves damaged files out by itself; a record that it cannot trust stops it.
        delete = f"delete {key}, then " if layout.checkpoint_version(key) is not None else "nothing to do: "
        return f"{source} and the experience after it are intact: {delete}`rlhf resume {self._name}` replays from there"

    def _export(self, key: str, version: int) -> str:
        gap = self._gap_before(version)
        if gap is not None:
            return f"it cannot be rebuilt: {gap}; only a copy of the store helps"
        if version != self.planned:
            return "the run goes on to a later version, which will be exported: delete this one or keep it as it is"
        return f"delete its record, then `rlhf resume {self._name}` exports policy version {version} again"
