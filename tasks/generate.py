"""Stage ``generate``: the engines sample the prompts of the iteration and stream what is finished into the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prefect.logging import get_run_logger

from rlhf_core.actors.jobs import GenerateJob, StageResult
from rlhf_core.engines.vllm_engine import Sampling
from rlhf_core.errors import WorkerDied
from rlhf_core.manifests import Shard, StageManifest
from rlhf_core.metrics import Max, Metric, Sum, merge_metrics, united, values
from rlhf_core.prompts.order import prompt_rows
from rlhf_core.seeds import SCHEME
from rlhf_core.segments import find_segments, request_identity
from tasks.context import StageContext, split
from tasks.handover import to_engines
from tasks.stage import manifest_of, stage_task

_SECONDS = "generate/engine_seconds"


@dataclass
class _Gathered:
    """What is durable so far."""

    shards: list[Shard] = field(default_factory=list)
    metrics: list[dict[str, Metric]] = field(default_factory=list)

    def missing(self, groups: int) -> list[int]:
        done = {group for shard in self.shards for group in shard.groups}
        return [group for group in range(groups) if group not in done]


@stage_task("generate", retryable=True)
def generate(context: StageContext) -> StageManifest:
    """Sample every prompt of the iteration at policy version = iteration.

    Groups that an earlier attempt made durable are taken over. The groups of an engine that dies go to the others.
    """
    config, prompts = context.config, context.prompts.train
    rows = prompt_rows(prompts.rows, config.generate.prompts_per_iteration, context.iteration, config.seed)
    identity = _identity(context, rows)
    to_engines(context)
    gathered = _taken_over(context, identity, len(rows))
    engines, living = context.engines, list(context.cluster.engines)
    while missing := gathered.missing(len(rows)):
        jobs = _jobs(context, rows, missing, len(living), identity)
        engines.names = tuple(living[: len(jobs)])
        results = engines.call_surviving("generate", [(job,) for job in jobs], seconds=context.deadline)
        _collect(gathered, results)
        dead = {name: r for name, r in zip(engines.names, results, strict=True) if isinstance(r, WorkerDied)}
        if dead:
            gathered = _after_deaths(context, identity, gathered, list(dead.values()))
            living = [name for name in living if name not in dead]
            if not living:
                raise next(iter(dead.values()))
    return _manifest(context, gathered)


def _identity(context: StageContext, rows: Sequence[int]) -> str:
    """All of the section counts, so that a new key cannot be forgotten."""
    return request_identity(
        prompts=context.prompts.train.blake3,
        rows=list(rows),
        policy_version=context.iteration,
        generate=context.config.generate.model_dump(mode="json"),
        seed=context.config.seed,
        streams=SCHEME,
    )


def _taken_over(context: StageContext, identity: str, groups: int) -> _Gathered:
    """Segments of earlier attempts, also those that still lie on the disks of their nodes."""
    context.engines.call("upload_leftovers", seconds=context.deadline)
    found = find_segments(context.store, context.run, context.iteration, identity)
    gathered = _Gathered([s.shard for s in found], [s.metrics for s in found])
    if found:
        done = groups - len(gathered.missing(groups))
        get_run_logger().info("taking over %d of %d groups that are durable already", done, groups)
    return gathered


def _jobs(
    context: StageContext, rows: Sequence[int], groups: Sequence[int], engines: int, identity: str
) -> list[GenerateJob]:
    """A job for each engine that has anything to do. A block of ``exact_groups`` is in one segment or in none, so what is
    missing is whole blocks."""
    config, block = context.config, max(1, context.config.generate.exact_groups)
    sampling = Sampling.of(config.generate, config.generate.samples_per_prompt)
    blocks = sorted({group // block for group in groups})
    parts = [
        [group for b in blocks[part.start : part.stop] for group in range(b * block, min((b + 1) * block, len(rows)))]
        for part in split(len(blocks), engines)
    ]
    return [
        GenerateJob(
            run=context.run,
            iteration=context.iteration,
            attempt=context.attempt,
            prompts=context.prompts.train,
            prompt_rows=tuple(rows[group] for group in part),
            groups=tuple(part),
            sampling=sampling,
            version=context.iteration,
            seed=config.seed,
            identity=identity,
            exact_groups=config.generate.exact_groups,
        )
        for part in parts
        if part
    ]


def _collect(gathered: _Gathered, results: Iterable[StageResult | WorkerDied]) -> None:
    """Add what engines answered that were called together. Their time counts once, the next call comes after it."""
    round_metrics: list[dict[str, Metric]] = []
    for result in results:
        if not isinstance(result, WorkerDied):
            gathered.shards += result.shards
            own = {
                "generate/new_tokens": Sum(float(result.metrics["generate/tokens"].value)),
                "memory/engine_peak_gib": Max(result.peak_gib),
            }
            round_metrics.append(united(result.metrics, own))
    if round_metrics:
        together = merge_metrics(round_metrics)
        gathered.metrics.append(together | {_SECONDS: Sum(together[_SECONDS].value)})


def _after_deaths(context: StageContext, identity: str, gathered: _Gathered, dead: Sequence[WorkerDied]) -> _Gathered:
    """What the dead engines made durable counts too; their other groups go to the engines that live."""
    known = {group for shard in gathered.shards for group in shard.groups}
    found = find_segments(context.store, context.run, context.iteration, identity, known)
    for error in dead:
        get_run_logger().warning("%s: its unfinished groups go to the other engines", error)
    return _Gathered(
        [*gathered.shards, *(s.shard for s in found)],
        [*gathered.metrics, *(s.metrics for s in found)],
    )


def _manifest(context: StageContext, gathered: _Gathered) -> StageManifest:
    metrics = values(merge_metrics(gathered.metrics))
    if "generate/new_tokens" in metrics:
        metrics["generate/tokens_per_second"] = metrics["generate/new_tokens"] / metrics[_SECONDS]
    return manifest_of(
        context,
        "generate",
        policy_version=context.iteration,
        shards=tuple(gathered.shards),
        tokens=int(metrics["generate/tokens"]),
        metrics=metrics,
    )
