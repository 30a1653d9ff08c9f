"""The records of a run: its branches, what lies in them, and whether the records of an iteration agree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from rlhf_core import layout
from rlhf_core.bases import base_keys
from rlhf_core.errors import NotCommitted
from rlhf_core.lineage import Lineage
from rlhf_core.manifests import (
    STAGES,
    BaseRecord,
    ChildRecord,
    IterationRecord,
    Manifest,
    RevisionRecord,
    RunRecord,
    StageManifest,
)
from rlhf_core.ports import ObjectStore
from rlhf_core.records import find_record
from tasks.audit.damage import Finding, Findings, Kind

M = TypeVar("M", bound=Manifest)

_COPY = "take it from a copy of the store"

#: Which stages a stage reads: their digests are in its ``parents``.
_READS = {
    "score": ("generate",),
    "advantages": ("generate", "score"),
    "update": ("generate", "score", "advantages"),
    "sync": ("update",),
}


class Reader:
    """Reads and verifies, and counts what it verified. Threads may share it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.findings = store, Findings(store)
        self.records = self.objects = self.bytes = 0
        self._lock = threading.Lock()

    def count_record(self) -> None:
        """One more record is intact."""
        with self._lock:
            self.records += 1

    def count_object(self, size: int) -> None:
        """One more shard or file of ``size`` bytes is intact."""
        with self._lock:
            self.objects += 1
            self.bytes += size

    def read(
        self, key: str, model: type[M], finding: Callable[[Kind, str], Finding], problem: str = "its record is missing"
    ) -> M | None:
        """A record; None, with a finding, if it is damaged or not there. No finding if absent where ``problem`` is empty."""
        record: M | None = None

        def load() -> None:
            nonlocal record
            record = find_record(self.store, key, model)

        if not self.findings.guard(key, load, finding):
            return None
        if record is not None:
            self.count_record()
        elif problem:
            self.findings.add(finding("missing", problem))
        return record


def load_branches(reader: Reader, run: str) -> Lineage | None:
    """The run's line of branches, with its revisions and children verified; None, with a finding, if it is broken.

    NotCommitted if nothing of the run is in the store.
    """
    name = layout.run_name(run)
    if not reader.store.list(layout.run_root(run)):
        raise NotCommitted(f"there is no run {run!r} in {reader.store.url}; see `rlhf runs`")
    newest, revisions = _revisions(reader, name)
    branch: str | None = layout.branch(name, newest) if run == name else run
    records: list[RunRecord] = []
    while branch is not None:
        revision = revisions.get(_number(branch)) if layout.run_name(branch) == name else None
        record = _branch_record(reader, branch, revision)
        if record is None:
            return None
        if any(earlier.run == record.run for earlier in records):
            problem = f"its line of parents comes back to {record.run!r}"
            reader.findings.add(Finding(layout.run_record(record.run), "inconsistent", problem, remedy=_COPY))
            return None
        records.append(record)
        branch = record.parent.run if record.parent is not None else None
    _children(reader, records)
    return Lineage(tuple(records))


def _number(branch: str) -> int:
    """The revision of a branch; 0 for the run's first one."""
    return int(branch.removeprefix(layout.run_name(branch))[1:] or 0)


def _revisions(reader: Reader, name: str) -> tuple[int, dict[int, RevisionRecord]]:
    """The number of the newest rerun, also if its record is damaged, and the records that are intact."""
    keys = reader.store.list(layout.revision(name, 1).rpartition("/")[0])
    stems = [key.rpartition("/")[2].removesuffix(".json") for key in keys]
    newest = max((int(stem) for stem in stems if stem.isdigit()), default=0)
    found = {}
    for number in range(1, newest + 1):
        key, branch = layout.revision(name, number), layout.branch(name, number)
        remedy = f"{layout.run_record(branch)} says the same about its parent: {_COPY}"
        make = partial(Finding, key, remedy=remedy)
        record = reader.read(key, RevisionRecord, make, f"revision {newest} exists, so this one must exist too")
        if record is not None and (record.run, record.revision) == (name, number):
            found[number] = record
        elif record is not None:
            reader.findings.add(make("inconsistent", f"it is revision {record.revision} of {record.run!r}"))
    return newest, found


def _branch_record(reader: Reader, branch: str, revision: RevisionRecord | None) -> RunRecord | None:
    key = layout.run_record(branch)
    finding = partial(Finding, key, remedy=_record_remedy(reader.store, branch))
    missing = f"nothing of {branch} counts without it; {_extent(reader.store, branch)}"
    record = reader.read(key, RunRecord, finding, missing)
    if record is not None and record.run != branch:
        reader.findings.add(finding("inconsistent", f"it is the record of {record.run!r}"))
        return None
    if record is not None and revision is not None and revision.parent != record.parent:
        where = layout.revision(revision.run, revision.revision)
        reader.findings.add(finding("inconsistent", f"it begins at {record.parent}, {where} says {revision.parent}"))
    return record


def _record_remedy(store: ObjectStore, branch: str) -> str:
    number = _number(branch)
    if number:
        revision = layout.revision(layout.run_name(branch), number)
        return f"{revision} says where the branch begins, its parent's run.json the rest: {_COPY}"
    if store.exists(layout.stage_commit(branch, 0, "generate")):
        return f"delete it if it is there; `rlhf train PRESET --run {branch}` with the run's preset writes it again"
    return f"if it was a fork, children/{branch}.json of its parent says where it begins: {_COPY}"


def _extent(store: ObjectStore, branch: str) -> str:
    folder = layout.iteration_root(branch, 0).rpartition("/")[0]
    numbers = sorted({int(part) for key in store.list(folder) if (part := key.split("/")[3]).isdigit()})
    return f"it has objects of the iterations {numbers[0]} to {numbers[-1]}" if numbers else "it has no iterations"


def _children(reader: Reader, records: list[RunRecord]) -> None:
    """Everybody who shares stages must be known to whose stages they are, or retention may delete them."""
    for place, record in enumerate(records):
        heirs = {layout.child(record.run, later.run): later for later in records[:place]}
        for key in sorted({*reader.store.list(layout.children(record.run)), *heirs}):
            child = key.rpartition("/")[2].removesuffix(".json")
            before = f"let nothing of {record.run} be retired before"
            finding = partial(Finding, key, remedy=f"{layout.run_record(child)} says the same: {_COPY}, and {before}")
            found = reader.read(key, ChildRecord, finding, f"{child} shares stages of {record.run}")
            if found is not None and key in heirs and (found.child, found.parent) != (child, heirs[key].parent):
                reader.findings.add(finding("inconsistent", f"it says {found.parent}, {child} {heirs[key].parent}"))


def load_bases(reader: Reader, lineage: Lineage) -> list[BaseRecord]:
    """The weights that replays gave, verified."""
    found = []
    for key in base_keys(reader.store, lineage):
        remedy = f"the stages after it say which weights they went on from: {_COPY}"
        record = reader.read(key, BaseRecord, partial(Finding, key, remedy=remedy), problem="")
        if record is not None:
            found.append(record)
    return found


@dataclass
class Survey:
    """What lies in the branches, from listings: enough to tell a gap from an end."""

    positions: int = 0
    """Stages that must be there, counted over all iterations: up to the last one that anything speaks of."""
    retired: dict[str, set[int]] = field(default_factory=dict)
    """Branch -> iterations with a RETIRED record."""
    guarded: dict[str, set[int]] = field(default_factory=dict)
    """Branch -> iterations with a GUARD record."""
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    """(policy version, branch), ascending."""
    evaluations: list[tuple[str, str]] = field(default_factory=list)
    """(branch, key)."""
    exports: list[tuple[str, str]] = field(default_factory=list)
    last: str = ""
    """Key that ``positions`` follows from."""

    def reach(self, iteration: int, stage: str, key: str) -> None:
        """Something says that this stage was committed."""
        position = iteration * len(STAGES) + STAGES.index(stage) + 1
        if position > self.positions:
            self.positions, self.last = position, key

    def behind(self, iteration: int, stage: str) -> str:
        """Why a stage that is not there must be there."""
        last, inside = divmod(self.positions - 1, len(STAGES))
        text = f"it is missing, but the run reaches stage {STAGES[inside]!r} of iteration {last} ({self.last})"
        if last > iteration:
            return f"{text}: the iterations {iteration + 1} to {last} come after this gap"
        return text


def survey(store: ObjectStore, lineage: Lineage) -> Survey:
    """List the branches of a run. Only what belongs to the run counts: a parent may have gone on by itself."""
    result = Survey()
    parent = lineage.record.parent
    if parent is not None:
        position = parent.iteration * len(STAGES) + STAGES.index(parent.stage)
        if position:
            last, inside = divmod(position - 1, len(STAGES))
            result.reach(last, STAGES[inside], layout.run_record(lineage.head))
    for record in lineage.records:
        branch = record.run
        result.retired[branch], result.guarded[branch] = set(), set()
        for key in store.list(layout.iteration_root(branch, 0).rpartition("/")[0]):
            _survey_iteration(result, lineage, branch, key)
        for key in store.list(layout.checkpoint_commits(branch)):
            version = layout.checkpoint_version(key)
            if version is not None and lineage.branch_of_version(version) == branch:
                result.checkpoints.append((version, branch))
                result.reach(version - 1, "update", key)
        for name, keys in (("evaluation", result.evaluations), ("export", result.exports)):
            for key in store.list(getattr(layout, name)(branch, "v").rpartition("/")[0]):
                version = version_of(key)
                if version is None or lineage.branch_of_version(version) != branch:
                    continue
                keys.append((branch, key))
                if version:
                    result.reach(version - 1, "commit", key)
    result.checkpoints.sort()
    return result


def _survey_iteration(result: Survey, lineage: Lineage, branch: str, key: str) -> None:
    _, _, _, number, *rest = key.split("/")
    if not number.isdigit() or not rest:
        return  # nothing that a run writes
    iteration = int(number)
    if rest == ["RETIRED.json"]:
        result.retired[branch].add(iteration)
    if rest == ["GUARD.json"]:
        result.guarded[branch].add(iteration)
    stage = "commit" if rest == ["DONE.json"] else rest[1].removesuffix(".json") if rest[0] == "commits" else ""
    if stage in STAGES and lineage.branch_of(iteration, stage) == branch:
        result.reach(iteration, stage, key)


def version_of(key: str) -> int | None:
    """The policy version of the record of an evaluation or export, None for any other key."""
    folder, _, name = key.rpartition("/")
    stem = name.removesuffix(".json")
    if folder.count("/") != 2 or stem == name or not stem.startswith("v") or not stem[1:].isdigit():
        return None
    return int(stem[1:])


def check_links(
    iteration: int, stages: dict[str, StageManifest], done: IterationRecord | None, bases: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """(stage, problem) for every contradiction between the records of an iteration, each of them sealed and whole.

    ``bases``: digests of weights that replays gave for the version that the iteration makes.
    """
    yield from _digests(stages, done)
    for stage, manifest in stages.items():
        version = iteration + 1 if stage == "sync" else iteration
        if manifest.policy_version != version:
            yield stage, f"it is of policy version {manifest.policy_version}, iteration {iteration} has {version} there"
    if done is not None and done.policy_version != iteration + 1:
        yield (
            "commit",
            f"it says policy version {done.policy_version}, the update of iteration {iteration} makes {iteration + 1}",
        )
    yield from _weights(stages, done, bases)


def _digests(stages: dict[str, StageManifest], done: IterationRecord | None) -> Iterator[tuple[str, str]]:
    witnesses: dict[str, dict[str, str]] = {stage: {} for stage in stages}  # stage -> who read it -> digest it had
    named = {stage: manifest.parents for stage, manifest in stages.items()}
    if done is not None:
        named["commit"] = done.stages
    for reader, digests in named.items():
        wanted = STAGES[:-1] if reader == "commit" else _READS.get(reader, ())
        for stage in (s for s in wanted if s not in digests):
            yield reader, f"it does not name the digest of stage {stage!r}, which it was made from"
        for stage, digest in digests.items():
            if stage in witnesses:
                witnesses[stage][reader] = digest
    refuted = {
        reader
        for stage, said in witnesses.items()
        for reader, digest in said.items()
        if digest != stages[stage].digest and stages[stage].digest in said.values()
    }
    for stage, said in witnesses.items():
        wrong = [reader for reader, digest in said.items() if digest != stages[stage].digest]
        credible = [reader for reader in wrong if reader not in refuted]
        if credible:
            names = " and ".join(credible)
            yield (
                stage,
                f"its digest is {stages[stage].digest}, {names} read {said[credible[0]]}: it was changed or replaced",
            )
        else:
            for reader in wrong:
                yield reader, f"it names {said[reader]} as stage {stage!r}, which is {stages[stage].digest}"


def _weights(
    stages: dict[str, StageManifest], done: IterationRecord | None, bases: Collection[str]
) -> Iterator[tuple[str, str]]:
    said: dict[str, str] = {
        s: str(stages[s].details.get("weights_digest", "")) for s in ("update", "sync") if s in stages
    }
    if done is not None:
        said["commit"] = done.weights_digest
    for stage in (stage for stage, digest in said.items() if not digest):
        yield stage, "it has no digest of the weights"
    said = {stage: digest for stage, digest in said.items() if stage == "update" or digest not in bases}
    if len(set(said.values())) > 1:
        values = list(said.values())
        common = max(values, key=values.count)
        for stage in (stage for stage, digest in said.items() if digest not in ("", common)):
            yield stage, f"its weights are {said[stage]}, those of {', '.join(s for s in said if s != stage)} {common}"
