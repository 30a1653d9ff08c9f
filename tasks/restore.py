"""Bring new ranks to the run's policy version: newest checkpoint, then replay of the committed experience after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Completed

from rlhf_core import layout
from rlhf_core.bases import ENVIRONMENT, FROM_WEIGHTS, environment_id, newest_base, promised, start_base, weights_of
from rlhf_core.config import RunConfig
from rlhf_core.errors import CorruptObject, DigestMismatch
from rlhf_core.manifests import BaseRecord, CheckpointRecord, ClusterRef, StageManifest
from tasks.apply_update import apply_update
from tasks.checkpoint import publish_checkpoint, save_checkpoint
from tasks.context import StageContext
from tasks.progress import newest_checkpoint

#: A replay that took longer, by what its updates took when they were recorded, is not to be done twice: a checkpoint follows.
_LONG_SECONDS = 60.0


@dataclass(frozen=True)
class Replay:
    """How new ranks came to a policy version."""

    start: int
    """Policy version of the checkpoint, 0 for the model folder."""
    seconds: float
    """Recorded seconds of the updates after it."""
    base: BaseRecord | None
    """What the run goes on from, where the replay did not give the recorded weights."""


def restore_trainers(config: RunConfig, cluster: ClusterRef, version: int) -> None:
    """Ranks freshly created at version 0 come to ``version``. Nothing is generated or scored again.

    Replayed updates that have to give the recorded weights and do not are a DigestMismatch, with both digests. Where nothing was
    promised (see ``rlhf_core.bases``) the run goes on from what the replay gave, and says so.
    """
    if version:
        _restore(config, cluster, version, return_state=True).result()


@task(name="restore", task_run_name="restore-v{version}", persist_result=False, cache_policy=NO_CACHE)
def _restore(config: RunConfig, cluster: ClusterRef, version: int) -> Any:
    """Load the newest checkpoint and replay the updates after it."""
    context = StageContext(config, cluster, version - 1, attempt="restore")
    done = _replay(context, version)
    exact = done.base is None
    if version > done.start and (not exact or done.seconds > _LONG_SECONDS):
        save_checkpoint(config, cluster, version - 1)
        publish_checkpoint(context, wait=True)
    message = f"policy version {version}, from version {done.start}"
    if done.base is None:
        return Completed(name="Replayed", message=message)
    return Completed(name="Replayed (not exact)", message=f"{message}: {done.base.reason}")


def _replay(context: StageContext, version: int) -> Replay:
    store, lineage = context.store, context.lineage
    start, weights = _load_newest(context, version)
    updates = [lineage.load(store, iteration, "update") for iteration in range(start, version)]
    seconds = sum(update.seconds for update in updates)
    if updates:
        get_run_logger().info(
            "replaying the updates of iterations %d to %d: about %s", start, version - 1, _duration(seconds)
        )
    environment = _environment(context)
    reason, started = "", time.monotonic()
    for number, update in enumerate(updates):
        found, why = _replay_one(context, update, weights, environment)
        reason, weights = reason or why, found
        get_run_logger().info(
            "replayed the update of iteration %d (%d of %d, %s so far)",
            update.iteration,
            number + 1,
            len(updates),
            _duration(time.monotonic() - started),
        )
    same = weights == weights_of(store, lineage, version)
    if same and not _begins_elsewhere(context, version):
        return Replay(start, seconds, None)
    reason = reason or ("" if same else "the checkpoint holds weights that the run has left")
    base = start_base(store, lineage, version, str(weights), start=start, environment=environment, reason=reason)
    if same:
        return Replay(start, seconds, None)
    get_run_logger().warning("policy version %d was replayed, not exactly: %s", version, reason)
    return Replay(start, seconds, base)


def _begins_elsewhere(context: StageContext, version: int) -> bool:
    """Whether the branch begins here with other ranks, threads or devices than its parent's. What these make of the version
    is written down, also if it is the same: living ranks of the parent's topology must not be taken for the branch's."""
    lineage = context.lineage
    if version != lineage.base_version() or lineage.is_exact(version - 1):
        return False
    return newest_base(context.store, lineage, version) is None


def _replay_one(context: StageContext, update: StageManifest, weights: str | None, environment: str) -> tuple[str, str]:
    """Apply a committed update again; the digest of the weights after it, and why they are not those recorded."""
    iteration, recorded = update.iteration, str(update.details["weights_digest"])
    replay = StageContext(context.config, context.cluster, iteration, attempt="restore")
    found = str(apply_update(replay, skipped=update.details.get("skipped")).details["weights_digest"])
    if found == recorded:
        return found, ""
    if promised(context.store, context.lineage, update, weights, environment):
        raise DigestMismatch(
            f"replaying the update of iteration {iteration} gave weights {found}, recorded were {recorded}, though nothing "
            f"that they depend on has changed (environment {environment}): a processor or memory computes wrong, or a file of "
            "the model changed. To go on from what the replay gives, add --set optim.deterministic=false to the command of the run"
        )
    return found, _why_not(update, weights, environment, iteration)


def _why_not(update: StageManifest, weights: str | None, environment: str, iteration: int) -> str:
    made_by = update.details.get(ENVIRONMENT)
    if made_by is None:
        return f"the update of iteration {iteration} does not say what computed it"
    if made_by != environment:
        return f"the update of iteration {iteration} was computed in environment {made_by}, the replay in {environment}"
    if update.details.get(FROM_WEIGHTS) != weights:
        return f"the update of iteration {iteration} began with other weights"
    return f"updates are not repeatable in environment {environment}"


def _environment(context: StageContext) -> str:
    return environment_id(context.trainers.call_status(context.deadline)[0]["environment"])


def _load_newest(context: StageContext, version: int) -> tuple[int, str | None]:
    """Load the newest checkpoint that is not after ``version``; returns its version and weights, (0, None) if there is none.

    A damaged one is left out with a warning: an older one, or the start, and more replay lead to the same weights.
    """
    limit = version
    while limit > 0:
        record = newest_checkpoint(context.store, context.lineage, limit)
        if record is None:
            break
        try:
            context.trainers.call("fetch_checkpoint", record, seconds=context.deadline)
        except CorruptObject as error:
            get_run_logger().warning("checkpoint of policy version %d left out: %s", record.policy_version, error)
            limit = record.policy_version - 1
            continue
        digests = set(context.trainers.call("load_checkpoint", record, seconds=context.deadline))
        _check_digest(record, digests)
        get_run_logger().info("loaded the checkpoint of policy version %d", record.policy_version)
        return record.policy_version, record.weights_digest
    return 0, None


def _check_digest(record: CheckpointRecord, digests: set[str]) -> None:
    if digests != {record.weights_digest}:
        key = layout.checkpoint_commit(record.run, record.policy_version)
        raise DigestMismatch(
            f"checkpoint {key} holds weights {sorted(digests)}, its record says {record.weights_digest}"
        )


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
