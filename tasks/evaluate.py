"""Evaluation on the held-out prompts, greedy and sampled."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_core import layout
from rlhf_core.actors.group import gather
from rlhf_core.actors.jobs import EvaluateJob
from rlhf_core.config import RunConfig
from rlhf_core.engines.vllm_engine import Sampling
from rlhf_core.manifests import ClusterRef, EvaluationRecord, Shard
from rlhf_core.metrics import merge_metrics, values
from rlhf_core.records import commit_record, find_record
from tasks.context import StageContext, split
from tasks.handover import to_engines
from tasks.rewards import conditions, reward_for_workers

#: Answers of each kind that the record keeps for people.
_SAMPLES = 8


@task(name="evaluate", task_run_name="evaluate-v{version}", persist_result=False, cache_policy=NO_CACHE)
def evaluate(config: RunConfig, cluster: ClusterRef, version: int) -> EvaluationRecord | None:
    """Metrics ``greedy/...`` and ``sampled/...`` of a policy version; None without held-out prompts.

    An evaluation that is recorded is not run again.
    """
    context = StageContext(config, cluster, version, attempt="evaluate")
    key = layout.evaluation(context.lineage.branch_of_version(version), layout.version_name(version))
    found = find_record(context.store, key, EvaluationRecord)
    if found is not None or context.prompts.heldout is None:
        return found
    to_engines(context)
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    kinds = {"greedy": Sampling.of(config.generate, 1, greedy=True, logprobs=False)}
    if config.evaluation.samples_per_prompt:
        kinds["sampled"] = Sampling.of(config.generate, config.evaluation.samples_per_prompt, logprobs=False)
    for kind, sampling in kinds.items():
        scored = _sample_and_score(context, context.prompts.heldout, version, sampling)
        # Where nothing was scored there is no mean, and readers say so.
        metrics |= {_name(kind, name): v for name, v in values(merge_metrics(s["metrics"] for s in scored)).items()}
        shown = [sample for part in scored for sample in part["samples"]]
        samples += [{"kind": kind, **sample} for sample in shown[:_SAMPLES]]
    record = EvaluationRecord(
        run=context.lineage.branch_of_version(version),
        name=layout.version_name(version),
        policy_version=version,
        prompts=context.prompts.heldout.rows,
        metrics=metrics,
        samples=samples,
    )
    return commit_record(context.store, key, record)[0]


def _name(kind: str, metric: str) -> str:
    return f"{kind}/reward" if metric == "reward/mean" else f"{kind}/{metric}"


def _sample_and_score(context: StageContext, heldout: Shard, version: int, sampling: Sampling) -> list[dict[str, Any]]:
    """All engines answer, then all reward workers score. The responses do not pass through this process."""
    cluster, config = context.cluster, context.config
    responses = [
        engine.evaluate.remote(cluster.epoch, version, heldout, rows, sampling, config.seed)
        for engine, rows in zip(context.engines.handles, split(heldout.rows, len(cluster.engines)), strict=True)
    ]
    reward, around = reward_for_workers(config), conditions(config)
    parts = split(heldout.rows * sampling.samples, len(cluster.rewards))
    scored = [
        worker.score_tables.remote(cluster.epoch, EvaluateJob(heldout, rows, reward, around), *responses)
        for worker, rows in zip(context.rewards.handles, parts, strict=True)
    ]
    watch = context.engines.watch(beside=context.rewards)
    return gather(scored, cluster.rewards, "evaluate", context.deadline, watch)
