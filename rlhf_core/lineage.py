"""What a run consists of: its head and the branches that the head shares stages with.

A rerun makes a new branch of the same run, a fork makes a run of its own; both begin at one stage of one iteration and share
everything before it with their parent, by reference. Nothing is copied, and nothing of the parent changes: the branch that a
stage belongs to follows from the positions where the branches begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlhf_core import layout
from rlhf_core.buffer import find_stage, load_stage
from rlhf_core.config import past_config, upgraded_fields
from rlhf_core.errors import CorruptObject, NotCommitted
from rlhf_core.manifests import (
    STAGES,
    ChildRecord,
    ParentRef,
    RevisionRecord,
    RunRecord,
    StageManifest,
)
from rlhf_core.ports import ObjectStore
from rlhf_core.records import canonical, commit_record, find_record, load_record, seal
from rlhf_core.searching import count_without_gaps

#: Longer chains of forks are taken for a damaged store.
_LONGEST = 1000


@dataclass(frozen=True)
class Lineage:
    """The branches of a run, the head first, each with the parent that it goes on from."""

    records: tuple[RunRecord, ...]

    @property
    def head(self) -> str:
        """Branch that new stages are committed to."""
        return self.records[0].run

    @property
    def record(self) -> RunRecord:
        """The head's record."""
        return self.records[0]

    def owner(self, iteration: int, stage: str) -> RunRecord:
        """The branch that the stage belongs to: its manifest lies there, and its configuration made it."""
        position = (iteration, STAGES.index(stage))
        for record in self.records:
            parent = record.parent
            if parent is None or position >= (parent.iteration, STAGES.index(parent.stage)):
                return record
        raise AssertionError("the last branch has no parent")

    def branch_of(self, iteration: int, stage: str) -> str:
        """Id of the stage's branch."""
        return self.owner(iteration, stage).run

    def branch_of_version(self, version: int) -> str:
        """Id of the branch whose update made this policy version; version 0 belongs to the root."""
        return self.branch_of(version - 1, "update") if version else self.records[-1].run

    def first_own(self) -> int:
        """First iteration whose record the head has to write itself: all before it are finished."""
        parent = self.record.parent
        return parent.iteration if parent is not None else 0

    def base_version(self) -> int:
        """Policy version that the head begins with."""
        parent = self.record.parent
        if parent is None:
            return 0
        return parent.iteration + (STAGES.index(parent.stage) > STAGES.index("update"))

    def is_exact(self, iteration: int) -> bool:
        """Whether the head's ranks, threads and devices are those that made the update of this iteration."""
        here, there = (past_config(r).resources for r in (self.record, self.owner(iteration, "update")))
        return (here.trainer_ranks, here.threads, here.device) == (there.trainer_ranks, there.threads, there.device)

    def find(self, store: ObjectStore, iteration: int, stage: str) -> StageManifest | None:
        """The committed manifest of a stage, wherever it lies; None if there is none."""
        return find_stage(store, self.branch_of(iteration, stage), iteration, stage)

    def load(self, store: ObjectStore, iteration: int, stage: str) -> StageManifest:
        """As ``find``; NotCommitted if there is none."""
        return load_stage(store, self.branch_of(iteration, stage), iteration, stage)


def current_revision(store: ObjectStore, run: str) -> int:
    """Number of the newest rerun; 0 if there was none."""
    return count_without_gaps(lambda n: store.exists(layout.revision(run, n + 1)))


def head_of(store: ObjectStore, run: str) -> str:
    """The branch that the run consists of now."""
    return layout.branch(run, current_revision(store, run))


def load_lineage(store: ObjectStore, run: str) -> Lineage:
    """Lineage of a run, or of one branch (``NAME~N``; ``NAME~0`` is the run before its first rerun).

    NotCommitted if it, or something it shares, is not there.
    """
    branch = layout.named_branch(run) if "~" in run else head_of(store, run)
    records: list[RunRecord] = []
    while True:
        record = find_record(store, layout.run_record(branch), RunRecord)
        if record is None:
            missing = f"there is no run {branch!r} in {store.url}"
            raise NotCommitted(
                f"{missing}, but {records[-1].run!r} shares its stages" if records else f"{missing}; see `rlhf runs`"
            )
        records.append(record)
        if record.parent is None:
            return Lineage(tuple(records))
        if len(records) > _LONGEST:
            raise CorruptObject(f"{layout.run_record(run)}: its line of parents does not end")
        branch = record.parent.run


def require_reached(store: ObjectStore, lineage: Lineage, iteration: int, stage: str) -> None:
    """NotCommitted unless everything before ``stage`` of ``iteration`` is committed."""
    before = STAGES[: STAGES.index(stage)]
    for k, name in ((iteration - 1, "commit"), *((iteration, s) for s in before)):
        if k < 0:
            continue
        branch = lineage.branch_of(k, name)
        key = layout.iteration_done(branch, k) if name == "commit" else layout.stage_commit(branch, k, name)
        if not store.exists(key):
            raise NotCommitted(
                f"run {layout.run_name(lineage.head)!r} has not reached stage {stage!r} of iteration {iteration}: "
                f"{key} is not committed"
            )


def start_branch(store: ObjectStore, record: RunRecord) -> RunRecord:
    """Write the record of a branch or fork, after telling the parent's branches about it, so that they keep what it shares."""
    if record.parent is None:
        raise ValueError(f"{record.run}: a branch has a parent")
    for shared in load_lineage(store, record.parent.run).records:
        child = ChildRecord(child=record.run, parent=record.parent)
        store.put(layout.child(shared.run, record.run), canonical(seal(child).model_dump(mode="json")))
    sealed = seal(record)
    store.put(layout.run_record(record.run), canonical(sealed.model_dump(mode="json")))
    return sealed


def start_revision(
    store: ObjectStore,
    lineage: Lineage,
    parent: ParentRef,
    by: str,
    request: str = "",
    changes: Mapping[str, Any] | None = None,
) -> RevisionRecord:
    """Make a new head of the run that goes on from ``parent``, a place in its lineage. The caller holds the lease.

    A ``request`` that made the newest revision already makes no other one: its record is returned. ``changes``: top-level
    keys of the configuration (``iterations``, ``resources``) that differ from the head's from there on.
    """
    run = layout.run_name(lineage.head)
    number = current_revision(store, run) + 1
    if request and number > 1:
        newest = load_record(store, layout.revision(run, number - 1), RevisionRecord)
        if newest.request == request:
            return newest
    created = datetime.now(UTC).isoformat(timespec="seconds")
    branch = lineage.record.model_copy(
        update={
            "run": layout.branch(run, number),
            "created": created,
            "parent": parent,
            "digest": "",
            **upgraded_fields(lineage.record, **(changes or {})),
        }
    )
    start_branch(store, branch)
    record = RevisionRecord(run=run, revision=number, parent=parent, created=created, by=by, request=request)
    return commit_record(store, layout.revision(run, number), record)[0]


def children(store: ObjectStore, branch: str) -> list[ChildRecord]:
    """Everybody who shares stages of this branch."""
    return [load_record(store, key, ChildRecord) for key in store.list(layout.children(branch))]
