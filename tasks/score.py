"""Stage ``score``: reward workers score the committed rollouts."""

from __future__ import annotations

from rlhf_core.actors.jobs import ScoreJob, StageResult
from rlhf_core.manifests import StageManifest
from rlhf_core.metrics import merge_metrics, united, values
from tasks.context import StageContext, split
from tasks.rewards import conditions, reward_for_workers
from tasks.stage import manifest_of, stage_task
from tasks.unlearned import require_scores


@stage_task("score", retryable=True)
def score(context: StageContext) -> StageManifest:
    """Score all rollouts; each worker writes the rewards of its rows."""
    rollouts, config = context.stage("generate"), context.config
    reward, around = reward_for_workers(config), conditions(config)
    jobs = [
        ScoreJob(
            run=context.run,
            iteration=context.iteration,
            attempt=context.attempt,
            prompts=context.prompts.train,
            rollouts=rollouts,
            rows=rows,
            reward=reward,
            conditions=around,
        )
        for rows in split(rollouts.rows, len(context.cluster.rewards))
    ]
    results: list[StageResult] = context.rewards.call_each("score", [(job,) for job in jobs], seconds=context.deadline)
    manifest = manifest_of(
        context,
        "score",
        policy_version=rollouts.policy_version,
        parents={"generate": rollouts.digest},
        shards=tuple(shard for r in results for shard in r.shards),
        tokens=rollouts.tokens,
        metrics=united(
            values(merge_metrics(r.metrics for r in results)),
            {"memory/reward_peak_gib": max(r.peak_gib for r in results)},
        ),
    )
    require_scores(context, manifest)
    return manifest
