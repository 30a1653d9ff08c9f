"""Stage ``update``: the ZeRO-3 ranks apply the experience once; version v becomes v + 1."""

from __future__ import annotations

from rlhf_core.actors.jobs import StageResult, UpdateJob
from rlhf_core.errors import IntegrityError
from rlhf_core.manifests import StageManifest
from rlhf_core.metrics import merge_metrics, values
from tasks.context import StageContext
from tasks.handover import to_trainers
from tasks.stage import manifest_of, stage_task


@stage_task("update", retryable=False)
def update(context: StageContext) -> StageManifest:
    """Apply the optimizer steps of the iteration. Not retried in place: a rank that failed inside is dirty."""
    return apply_update(context)


def apply_update(context: StageContext) -> StageManifest:
    """Run the update on all ranks; they must agree on the digest of the new weights."""
    rollouts, rewards, experience = (context.stage(name) for name in ("generate", "score", "advantages"))
    job = UpdateJob(
        run=context.run,
        iteration=context.iteration,
        rollouts=rollouts,
        rewards=rewards,
        experience=experience,
        groups=context.config.generate.prompts_per_iteration,
        version=rollouts.policy_version,
    )
    to_trainers(context)
    results: list[StageResult] = context.trainers.call("update", job, seconds=context.deadline)
    digests = {r.weights_digest for r in results}
    if len(digests) != 1:
        raise IntegrityError(
            f"the ranks disagree about the weights of version {job.version + 1}: {sorted(map(str, digests))}"
        )
    return manifest_of(
        context,
        "update",
        policy_version=job.version,
        parents={"generate": rollouts.digest, "score": rewards.digest, "advantages": experience.digest},
        tokens=rollouts.tokens,
        metrics=values(merge_metrics(r.metrics for r in results)) | {"update/seconds": max(r.seconds for r in results)},
        details={"weights_digest": digests.pop()},
    )
