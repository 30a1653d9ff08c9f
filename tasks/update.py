"""Stage ``update``: the ZeRO-3 ranks apply the experience once; version v becomes v + 1."""

from __future__ import annotations

from prefect.logging import get_run_logger

from rlhf_core import layout
from rlhf_core.errors import GuardTripped, NumericsError
from rlhf_core.guards import BATCH, UPDATE, not_finite, violations
from rlhf_core.manifests import GuardRecord, StageManifest
from rlhf_core.records import commit_record, find_record
from tasks.apply_update import apply_update
from tasks.context import StageContext
from tasks.stage import stage_task
from tasks.unlearned import require_gradient


@stage_task("update", retryable=False)
def update(context: StageContext) -> StageManifest:
    """Apply the optimizer steps of the iteration. Not retried in place: a rank that failed inside is dirty.

    A batch that is out of bounds stops the run here, or is left out: the version counts on and the weights stay. If that
    shows only after the optimizer steps, the ranks are dirty; the run is restored to version v and comes back here.
    """
    guards, iteration = context.config.guards, context.iteration
    key = layout.guard(context.run, iteration)
    rolled_back = find_record(context.store, key, GuardRecord)
    reason = rolled_back.reason if rolled_back else "; ".join(_batch_violations(context))
    if reason:
        _require_skip(context, reason)
        get_run_logger().warning("iteration %d is left out: %s", iteration, reason)
        return apply_update(context, skipped=reason)
    require_gradient(context)
    try:
        manifest = apply_update(context)
        reason = "; ".join(not_finite(manifest) + violations(guards, manifest.metrics, UPDATE))
    except NumericsError as error:
        reason = str(error)
    if not reason:
        return manifest
    _require_skip(context, reason)
    commit_record(context.store, key, GuardRecord(run=context.run, iteration=iteration, reason=reason))
    raise GuardTripped(f"iteration {iteration}: {reason}: rolling back to policy version {iteration}")


def _batch_violations(context: StageContext) -> list[str]:
    """What is out of bounds before the update is begun."""
    rollouts, rewards, experience = (context.stage(name) for name in ("generate", "score", "advantages"))
    metrics = rewards.metrics | experience.metrics
    return not_finite(rollouts, rewards, experience) + violations(context.config.guards, metrics, BATCH)


def _require_skip(context: StageContext, reason: str) -> None:
    """NumericsError, before anything is committed, unless the batch may be left out."""
    guards, run, iteration = context.config.guards, context.run, context.iteration
    where = f"iteration {iteration}: {reason}. Nothing was committed; the batch stays: rlhf rollouts {run} {iteration}"
    if guards.action == "stop":
        raise NumericsError(f"{where}. To leave such batches out: --set guards.action=skip")
    before = range(max(0, iteration - guards.skips_in_a_row), iteration)
    skipped = [k for k in before if "skipped" in context.lineage.load(context.store, k, "update").details]
    if len(skipped) == guards.skips_in_a_row:
        raise NumericsError(f"{where}. The {len(skipped)} batches before were left out too (guards.skips_in_a_row)")
