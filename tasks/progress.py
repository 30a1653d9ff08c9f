"""Where a run stands, from the store alone."""

from __future__ import annotations

from rlhf_core import layout
from rlhf_core.config import past_config
from rlhf_core.lineage import Lineage
from rlhf_core.manifests import STAGES, CheckpointRecord, Progress, TargetRecord
from rlhf_core.ports import ObjectStore
from rlhf_core.records import find_record
from rlhf_core.searching import count_without_gaps


def load_progress(store: ObjectStore, lineage: Lineage) -> Progress:
    """Count the finished iterations with a logarithmic number of look-ups: they have no gaps."""
    head = lineage.head
    done = count_without_gaps(lambda k: store.exists(layout.iteration_done(head, k)), lineage.first_own())
    updated = lineage.find(store, done, "update") is not None
    return Progress(run=head, next_iteration=done, policy_version=done + 1 if updated else done)


def next_stage(store: ObjectStore, lineage: Lineage) -> tuple[int, str]:
    """Iteration and stage that come next."""
    iteration = load_progress(store, lineage).next_iteration
    missing = (name for name in STAGES[:-1] if lineage.find(store, iteration, name) is None)
    return iteration, next(missing, STAGES[-1])


def planned_iterations(store: ObjectStore, lineage: Lineage) -> int:
    """Iterations that the run is to have: the last number asked for, and never fewer than are finished."""
    target = find_record(store, layout.run_target(lineage.head), TargetRecord)
    wanted = target.iterations if target is not None else past_config(lineage.record).iterations
    return max(wanted, load_progress(store, lineage).next_iteration)


def newest_checkpoint(store: ObjectStore, lineage: Lineage, version: int) -> CheckpointRecord | None:
    """The newest committed checkpoint at or before ``version``, of the head or of what it shares."""
    for branch in (record.run for record in lineage.records):
        for found in reversed(committed_versions(store, branch)):
            if found <= version and lineage.branch_of_version(found) == branch:
                record = find_record(store, layout.checkpoint_commit(branch, found), CheckpointRecord)
                if record is not None:
                    return record
    return None


def committed_versions(store: ObjectStore, branch: str) -> list[int]:
    """Policy versions of the branch's own committed checkpoints, in order."""
    versions = (layout.checkpoint_version(key) for key in store.list(layout.checkpoint_commits(branch)))
    return sorted(version for version in versions if version is not None)
