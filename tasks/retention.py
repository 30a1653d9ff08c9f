"""What a run gives up as it goes on: old checkpoints, and old rollouts. The driver calls ``retire`` after a checkpoint.

The rule. Only what the head branch itself wrote is ever deleted; what it shares with a parent is the parent's.

* A checkpoint stays if it is among the newest ``checkpoint.keep``, if its version is a multiple of ``checkpoint.keep_every``,
  or if it is the newest one at or before the version that a fork or rerun of this branch begins at.
* The rollouts, rewards and experience of iteration k stay unless all of this is true: ``storage.keep_rollouts_hours`` is set
  and the iteration ended longer ago; its policy version k + 1 is at or before the oldest of the newest ``checkpoint.keep``
  checkpoints, so that each of these can still be replayed from; no fork or rerun shares any stage of it or of a later
  iteration. Iterations retire in order. Manifests and DONE.json stay for ever.

A checkpoint's record is deleted before its files, and RETIRED.json is written before a shard is deleted, so whoever looks
finds either the whole or a word that it is gone. What a killed process leaves behind is found by ``tasks.garbage.collect``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.errors import NotCommitted
from rlhf_core.lineage import Lineage, children
from rlhf_core.manifests import STAGES, ChildRecord, IterationRecord, RetiredRecord
from rlhf_core.ports import ObjectStore
from rlhf_core.records import commit_record, find_record
from rlhf_core.searching import count_without_gaps
from tasks.progress import committed_versions

#: The stages whose shards retire.
ROLLOUT_STAGES = ("generate", "score", "advantages")
#: Iterations that one call retires at most: a long backlog is worked off over several calls.
_MOST = 50


@dataclass(frozen=True)
class Retired:
    """What a call deleted."""

    checkpoints: tuple[int, ...] = ()
    """Policy versions."""
    iterations: tuple[int, ...] = ()
    objects: int = 0


def retire(store: ObjectStore, lineage: Lineage, config: RunConfig) -> Retired:
    """Delete what the rule above gives up. For the holder of the run's lease, after a checkpoint was committed.

    Costs a few listings and a logarithmic number of look-ups, whatever the length of the run, and five requests for each
    iteration that retires. Without any checkpoint of the head nothing happens. OSError if the store fails; calling again
    goes on where it stopped.
    """
    head = lineage.head
    versions = committed_versions(store, head)
    if not versions:
        return Retired()
    objects, old = 0, _old_checkpoints(store, head, versions, config)
    for version in old:
        store.delete([layout.checkpoint_commit(head, version)])
        objects += _delete_folder(store, layout.checkpoint_root(head, version))
    iterations: list[int] = []
    if config.storage.keep_rollouts_hours is not None:
        behind = versions[-config.checkpoint.keep :][0]
        iterations, deleted = _retire_rollouts(store, lineage, behind, config.storage.keep_rollouts_hours)
        objects += deleted
    return Retired(tuple(old), tuple(iterations), objects)


def first_unshared(store: ObjectStore, branch: str) -> int:
    """First iteration of which no fork or rerun of the branch shares anything; 0 if there is none.

    A fork of a fork is listed here too, but what it shares with this branch the fork between them shares as well.
    """
    return max((_first_after(record) for record in children(store, branch) if record.parent.run == branch), default=0)


def require_experience(store: ObjectStore, lineage: Lineage, iterations: Iterable[int]) -> None:
    """NotCommitted if the rollouts of one of the iterations were deleted on purpose: it cannot be replayed or redone.

    A fork checks this after it has written its child records, so that it and ``retire`` cannot miss each other.
    """
    for iteration in iterations:
        for branch in {lineage.branch_of(iteration, stage) for stage in ROLLOUT_STAGES}:
            record = find_record(store, layout.iteration_retired(branch, iteration), RetiredRecord)
            if record is not None:
                raise NotCommitted(
                    f"the rollouts of iteration {iteration} of {branch!r} were deleted at {record.retired} "
                    f"({record.reason}): choose a later iteration"
                )


def _old_checkpoints(store: ObjectStore, branch: str, versions: list[int], config: RunConfig) -> list[int]:
    every = config.checkpoint.keep_every
    kept = set(versions[-config.checkpoint.keep :])
    kept |= {version for version in versions if every and version % every == 0}
    for record in children(store, branch):
        kept |= set([version for version in versions if version <= _version_at(record)][-1:])
    return [version for version in versions if version not in kept]


def _retire_rollouts(store: ObjectStore, lineage: Lineage, behind: int, hours: float) -> tuple[list[int], int]:
    """Retire the iterations before ``behind`` that are old enough; which ones, and how many objects were deleted."""
    head = lineage.head
    first = max(lineage.first_own(), first_unshared(store, head))
    begin = count_without_gaps(lambda k: store.exists(layout.iteration_retired(head, k)), first)
    # Who was killed in the middle of it left the last one half deleted.
    deleted = _delete_rollouts(store, head, begin - 1) if begin > first else 0
    retired = []
    for iteration in range(begin, min(behind, begin + _MOST)):
        done = find_record(store, layout.iteration_done(head, iteration), IterationRecord)
        now = datetime.now(UTC)
        if done is None or (now - datetime.fromisoformat(done.finished)).total_seconds() < hours * 3600:
            break
        reason = f"storage.keep_rollouts_hours = {hours:g}, and a newer checkpoint is committed"
        stamp = now.isoformat(timespec="seconds")
        record = RetiredRecord(run=head, iteration=iteration, retired=stamp, reason=reason)
        commit_record(store, layout.iteration_retired(head, iteration), record)
        # A fork says first that it shares the iteration and then looks for RETIRED.json: one of the two sees the other.
        if iteration < first_unshared(store, head):
            break
        deleted += _delete_rollouts(store, head, iteration)
        retired.append(iteration)
    return retired, deleted


def _delete_rollouts(store: ObjectStore, branch: str, iteration: int) -> int:
    return sum(_delete_folder(store, layout.stage_data(branch, iteration, stage)) for stage in ROLLOUT_STAGES)


def _delete_folder(store: ObjectStore, prefix: str) -> int:
    keys = store.list(prefix)
    store.delete(keys)
    return len(keys)


def _first_after(child: ChildRecord) -> int:
    """First iteration that the child shares nothing of."""
    return child.parent.iteration + (1 if STAGES.index(child.parent.stage) > 0 else 0)


def _version_at(child: ChildRecord) -> int:
    """Policy version that the child begins at."""
    after_update = STAGES.index(child.parent.stage) > STAGES.index("update")
    return child.parent.iteration + (1 if after_update else 0)
