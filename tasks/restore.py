"""Bring new actors to the run's policy version: newest checkpoint, then replay of the committed experience after it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from prefect.logging import get_run_logger

from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.errors import DigestMismatch
from rlhf_core.manifests import CheckpointRecord, ClusterRef
from tasks.checkpoint import download_files, newest_checkpoint
from tasks.context import StageContext
from tasks.sync import push_weights
from tasks.update import apply_update


def restore(config: RunConfig, cluster: ClusterRef, version: int) -> None:
    """Trainers and engines, freshly created at version 0, come to ``version``. Nothing is generated or scored again.

    DigestMismatch if a replayed update does not reproduce the recorded weights.
    """
    if version == 0:
        return
    context = StageContext(config, cluster, version - 1, attempt="restore")
    start = _load_newest(context, version)
    for iteration in range(start, version):
        replay = StageContext(config, cluster, iteration, attempt="restore")
        recorded = replay.stage("update").details["weights_digest"]
        found = apply_update(replay).details["weights_digest"]
        if found != recorded:
            raise DigestMismatch(
                f"replaying the update of iteration {iteration} gave weights {found}, recorded were {recorded}: this run "
                "cannot be continued exactly here (other hardware, library versions or number of ranks or threads?)"
            )
        get_run_logger().info("replayed the update of iteration %d", iteration)
    digest = context.stage("update").details["weights_digest"]
    push_weights(context, version, digest)


def _load_newest(context: StageContext, version: int) -> int:
    """Load the newest checkpoint that is not after ``version``; returns its version, 0 if there is none."""
    record = newest_checkpoint(context.store, context.lineage, version)
    if record is None:
        return 0
    folder = Path(tempfile.mkdtemp(prefix="rlhf-restore-"))
    try:
        download_files(context.store, record.files, folder)
        arguments = (record.policy_version, str(folder))
        digests = set(context.trainers.call("load_checkpoint", *arguments, seconds=context.deadline))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _check_digest(record, digests)
    get_run_logger().info("loaded the checkpoint of policy version %d", record.policy_version)
    return record.policy_version


def _check_digest(record: CheckpointRecord, digests: set[str]) -> None:
    if digests != {record.weights_digest}:
        key = layout.checkpoint_commit(record.run, record.policy_version)
        raise DigestMismatch(
            f"checkpoint {key} holds weights {sorted(digests)}, its record says {record.weights_digest}"
        )
