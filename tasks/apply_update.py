"""Applying an iteration's experience on the ranks: by the update stage, and again when a run is restored."""

from __future__ import annotations

from rlhf_core.actors.jobs import StageResult, UpdateJob
from rlhf_core.bases import ENVIRONMENT, FROM_WEIGHTS
from rlhf_core.config import past_config
from rlhf_core.errors import IntegrityError
from rlhf_core.manifests import StageManifest
from rlhf_core.metrics import merge_metrics, united, values
from tasks.context import StageContext
from tasks.handover import to_trainers
from tasks.layouts import learn_settings
from tasks.stage import manifest_of


def apply_update(context: StageContext, skipped: str | None = None) -> StageManifest:
    """Run the update on all ranks; they must agree on the digest of the new weights. Nothing is committed.

    ``skipped``: why the batch is left out. The version counts on, the weights stay as they are.
    """
    rollouts, rewards, experience = (context.stage(name) for name in ("generate", "score", "advantages"))
    config = past_config(context.lineage.owner(context.iteration, "update"))
    job = UpdateJob(
        iteration=context.iteration,
        rollouts=rollouts,
        rewards=rewards,
        experience=experience,
        groups=config.generate.prompts_per_iteration,
        version=rollouts.policy_version,
        learn=learn_settings(context, config),
        skipped=skipped is not None,
    )
    to_trainers(context)
    results: list[StageResult] = context.trainers.call("update", job, seconds=context.deadline)
    ends = {(r.from_weights, r.weights_digest, r.environment) for r in results}
    if len(ends) != 1:
        raise IntegrityError(
            f"the ranks disagree about the weights before and after version {job.version + 1}: {sorted(map(str, ends))}"
        )
    before, after, environment = ends.pop()
    return manifest_of(
        context,
        "update",
        policy_version=job.version,
        parents={"generate": rollouts.digest, "score": rewards.digest, "advantages": experience.digest},
        tokens=rollouts.tokens,
        metrics=united(
            values(merge_metrics(r.metrics for r in results)),
            {
                "update/seconds": max(r.seconds for r in results),
                "memory/trainer_peak_gib": max(r.peak_gib for r in results),
            },
        ),
        details={"weights_digest": after, FROM_WEIGHTS: before, ENVIRONMENT: environment}
        | ({} if skipped is None else {"skipped": skipped}),
    )
