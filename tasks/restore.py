"""Bring new ranks to the run's policy version: newest checkpoint, then replay of the committed experience after it."""

from __future__ import annotations

from prefect.logging import get_run_logger

from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.errors import CorruptObject, DigestMismatch
from rlhf_core.manifests import BaseRecord, CheckpointRecord, ClusterRef
from rlhf_core.records import commit_record
from tasks.apply_update import apply_update
from tasks.context import StageContext
from tasks.progress import newest_checkpoint


def restore_trainers(config: RunConfig, cluster: ClusterRef, version: int) -> None:
    """Ranks freshly created at version 0 come to ``version``. Nothing is generated or scored again.

    DigestMismatch, with both digests, if a replayed update does not reproduce the recorded weights.
    """
    if version == 0:
        return
    context = StageContext(config, cluster, version - 1, attempt="restore")
    start = _load_newest(context, version)
    for iteration in range(start, version):
        replay = StageContext(config, cluster, iteration, attempt="restore")
        recorded = replay.stage("update").details
        found = apply_update(replay, skipped=recorded.get("skipped")).details["weights_digest"]
        if context.lineage.is_exact(iteration):
            _require_same(f"replaying the update of iteration {iteration}", found, recorded["weights_digest"])
        get_run_logger().info("replayed the update of iteration %d", iteration)
    base = context.lineage.base_version()
    if start <= base == version and base and not context.lineage.is_exact(base - 1):
        _agree_on_base(context, base)


def _require_same(what: str, found: str, recorded: str) -> None:
    if found != recorded:
        raise DigestMismatch(
            f"{what} gave weights {found}, recorded were {recorded}: this run cannot be continued exactly here (other "
            "hardware, library versions or number of ranks or threads?)"
        )


def _agree_on_base(context: StageContext, version: int) -> None:
    """Write down what weights this topology begins with; whoever restores it again has to come to the same ones."""
    digests = {status["digest"] for status in context.trainers.call_status(context.deadline)}
    record = BaseRecord(run=context.run, policy_version=version, weights_digest=digests.pop())
    known, _ = commit_record(context.store, layout.base(context.run), record)
    _require_same(f"restoring policy version {version}", record.weights_digest, known.weights_digest)


def _load_newest(context: StageContext, version: int) -> int:
    """Load the newest checkpoint that is not after ``version``; returns its version, 0 if there is none.

    A damaged one is left out with a warning: an older one, or the start, and more replay lead to the same weights.
    """
    limit = version
    while limit > 0:
        record = newest_checkpoint(context.store, context.lineage, limit)
        if record is None:
            return 0
        try:
            context.trainers.call("fetch_checkpoint", record, seconds=context.deadline)
        except CorruptObject as error:
            get_run_logger().warning("checkpoint of policy version %d left out: %s", record.policy_version, error)
            limit = record.policy_version - 1
            continue
        digests = set(context.trainers.call("load_checkpoint", record, seconds=context.deadline))
        _check_digest(record, digests)
        get_run_logger().info("loaded the checkpoint of policy version %d", record.policy_version)
        return record.policy_version
    return 0


def _check_digest(record: CheckpointRecord, digests: set[str]) -> None:
    if digests != {record.weights_digest}:
        key = layout.checkpoint_commit(record.run, record.policy_version)
        raise DigestMismatch(
            f"checkpoint {key} holds weights {sorted(digests)}, its record says {record.weights_digest}"
        )
