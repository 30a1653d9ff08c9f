"""Stage ``advantages``: old and reference logprobs from the trainer, and the estimator."""

from __future__ import annotations

from rlhf_core.actors.jobs import ExperienceJob, StageResult
from rlhf_core.manifests import StageManifest
from rlhf_core.metrics import merge_metrics, united, values
from tasks.context import StageContext
from tasks.handover import to_trainers
from tasks.layouts import learn_settings
from tasks.stage import manifest_of, stage_task


@stage_task("advantages", retryable=True)
def advantages(context: StageContext) -> StageManifest:
    """Every rank writes the experience of its rows."""
    rollouts, rewards, config = context.stage("generate"), context.stage("score"), context.config
    job = ExperienceJob(
        run=context.run,
        iteration=context.iteration,
        attempt=context.attempt,
        rollouts=rollouts,
        rewards=rewards,
        version=rollouts.policy_version,
        learn=learn_settings(context, config),
    )
    to_trainers(context)
    results: list[StageResult] = context.trainers.call("experience", job, seconds=context.deadline)
    return manifest_of(
        context,
        "advantages",
        policy_version=rollouts.policy_version,
        parents={"generate": rollouts.digest, "score": rewards.digest},
        shards=tuple(shard for r in results for shard in r.shards),
        tokens=rollouts.tokens,
        metrics=united(
            values(merge_metrics(r.metrics for r in results)), {"advantages/seconds": max(r.seconds for r in results)}
        ),
    )
