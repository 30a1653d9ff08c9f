"""Checkpoints: the ranks save to their local disks, upload in the background, and one record commits what has arrived."""

from __future__ import annotations

import uuid

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from rlhf_core import layout
from rlhf_core.actors.checkpointing import SavedCheckpoint, lack_of_room
from rlhf_core.bases import weights_of
from rlhf_core.config import RunConfig
from rlhf_core.manifests import CheckpointRecord, ClusterRef
from rlhf_core.records import commit_record, find_record
from tasks.context import StageContext

#: Where a replay does not give the same bits, checkpoints come so many times as often; with `checkpoint.every` = 0 also then,
#: every so many iterations.
_MORE_OFTEN = 5


def checkpoint_interval(config: RunConfig, exact: bool) -> int:
    """Iterations between checkpoints, 0 for none. Without exact replay what lies behind the newest one changes when it is
    recovered, so that there they are made more often than was asked for."""
    every = config.checkpoint.every
    return every if exact else max(1, every // _MORE_OFTEN) if every else _MORE_OFTEN


def due(config: RunConfig, exact: bool, iteration: int) -> bool:
    """Whether a checkpoint follows this iteration. The last one needs none: its policy is exported."""
    every, done = checkpoint_interval(config, exact), iteration + 1
    return bool(every) and done % every == 0 and done < config.iterations


@task(name="checkpoint", task_run_name="it{iteration:06d}-checkpoint", persist_result=False, cache_policy=NO_CACHE)
def save_checkpoint(config: RunConfig, cluster: ClusterRef, iteration: int) -> None:
    """Save policy version iteration + 1 on the ranks' disks; the upload goes on beside the next iterations.

    Where a disk has no room for it, it is given up with a warning: the next one comes, and replay covers the distance.
    """
    context = StageContext(config, cluster, iteration, attempt=uuid.uuid4().hex[:16])
    version = iteration + 1
    if find_record(context.store, layout.checkpoint_commit(context.run, version), CheckpointRecord) is not None:
        return
    publish_checkpoint(context, wait=True)  # one at a time: the next save would overwrite what the ranks know about it
    if (lack := lack_of_room(context.trainers.call("checkpoint_room", seconds=context.deadline))) is not None:
        get_run_logger().warning("the checkpoint of policy version %d is given up: %s", version, lack)
        return
    context.require_lease()
    prefix = layout.checkpoint_attempt(context.run, version, context.attempt)
    context.trainers.call("save_checkpoint", version, context.attempt, prefix, seconds=context.deadline)


def publish_checkpoint(context: StageContext, wait: bool = False) -> CheckpointRecord | None:
    """Commit the newest checkpoint if all ranks have brought it up; ``wait`` until they have. None if there is nothing new.

    A checkpoint that could not be uploaded is given up with a warning: the next one comes, and replay covers the distance.
    """
    saved: list[SavedCheckpoint | None] = context.trainers.call("saved_checkpoint", wait, seconds=context.deadline)
    first = saved[0]
    if first is None or any(s is None or s.attempt != first.attempt for s in saved):
        return None
    if context.lineage.branch_of_version(first.version) != context.run:  # saved before a rerun made another head
        return None
    errors = [s.error for s in saved if s is not None and s.error is not None]
    if errors:
        get_run_logger().warning("the checkpoint of policy version %d is given up: %s", first.version, errors[0])
        return None
    parts = [s.files for s in saved if s is not None and s.files is not None]
    key = layout.checkpoint_commit(context.run, first.version)
    if len(parts) < len(saved) or find_record(context.store, key, CheckpointRecord) is not None:
        return None
    made_by = context.lineage.load(context.store, first.version - 1, "update")
    context.require_lease()
    record = CheckpointRecord(
        run=context.run,
        policy_version=first.version,
        world_size=len(saved),
        weights_digest=str(weights_of(context.store, context.lineage, first.version)),
        update=made_by.digest,
        files=tuple(file for part in parts for file in part),
    )
    return commit_record(context.store, key, record)[0]
