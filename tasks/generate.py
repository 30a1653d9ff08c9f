"""Stage ``generate``: the engines sample the prompts of the iteration."""

from __future__ import annotations

from rlhf_core.actors.jobs import GenerateJob, StageResult
from rlhf_core.engines.vllm_engine import Sampling
from rlhf_core.manifests import StageManifest
from rlhf_core.metrics import merge_metrics, values
from rlhf_core.prompts.order import prompt_rows
from tasks.context import StageContext, split
from tasks.handover import to_engines
from tasks.stage import manifest_of, stage_task


@stage_task("generate", retryable=True)
def generate(context: StageContext) -> StageManifest:
    """Sample every prompt of the iteration at policy version = iteration; the engines write the rollouts."""
    config, prompts = context.config, context.prompts.train
    rows = prompt_rows(prompts.rows, config.generate.prompts_per_iteration, context.iteration, config.seed)
    sampling = Sampling(config.generate.samples_per_prompt, config.generate.max_new_tokens, config.generate.temperature)
    jobs = [
        GenerateJob(
            run=context.run,
            iteration=context.iteration,
            attempt=context.attempt,
            prompts=prompts,
            prompt_rows=tuple(rows[part.start : part.stop]),
            first_group=part.start,
            sampling=sampling,
            version=context.iteration,
            seed=sampling_seed(config.seed, context.iteration, engine),
        )
        for engine, part in enumerate(split(len(rows), len(context.cluster.engines)))
    ]
    to_engines(context)
    busy = [(engine, job) for engine, job in enumerate(jobs) if job.prompt_rows]
    engines = context.engines
    engines.names = tuple(engines.names[engine] for engine, _ in busy)
    results: list[StageResult] = engines.call_each("generate", [(job,) for _, job in busy], seconds=context.deadline)
    metrics = values(merge_metrics(r.metrics for r in results))
    metrics["generate/tokens_per_second"] = metrics["generate/tokens"] / metrics["generate/engine_seconds"]
    return manifest_of(
        context,
        "generate",
        policy_version=context.iteration,
        shards=tuple(shard for r in results for shard in r.shards),
        tokens=int(metrics["generate/tokens"]),
        metrics=metrics,
    )


def sampling_seed(seed: int, iteration: int, engine: int) -> int:
    """Seed of one engine's samplers in one iteration."""
    return (seed * 1_000_003 + iteration) * 4_099 + engine
