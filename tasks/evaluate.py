"""Evaluation on the held-out prompts, greedy and sampled."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_core import layout
from rlhf_core.actors.group import gather
from rlhf_core.config import RunConfig
from rlhf_core.engines.vllm_engine import Sampling
from rlhf_core.manifests import ClusterRef, EvaluationRecord
from rlhf_core.metrics import values
from rlhf_core.records import commit_record, find_record
from tasks.context import StageContext
from tasks.handover import to_engines
from tasks.rewards import reward_for_workers


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
        scored = _sample_and_score(context, version, sampling)
        metrics |= {f"{kind}/{name}": v for name, v in values(scored["metrics"]).items()}
        metrics[f"{kind}/reward"] = metrics.pop(f"{kind}/reward/mean")
        samples += [{"kind": kind, **sample} for sample in scored["samples"]]
    record = EvaluationRecord(
        run=context.lineage.branch_of_version(version),
        name=layout.version_name(version),
        policy_version=version,
        prompts=context.prompts.heldout.rows,
        metrics=metrics,
        samples=samples,
    )
    return commit_record(context.store, key, record)[0]


def _sample_and_score(context: StageContext, version: int, sampling: Sampling) -> dict[str, Any]:
    """The responses go from the engine to a reward worker without passing through this process."""
    heldout, epoch = context.prompts.heldout, context.cluster.epoch
    engine, worker = context.engines.handles[0], context.rewards.handles[0]
    responses = engine.evaluate.remote(epoch, version, heldout, sampling, context.config.seed)
    scored = worker.score_table.remote(epoch, reward_for_workers(context.config), heldout, responses)
    watch = context.engines.watch(beside=context.rewards)
    return gather([scored], [context.cluster.rewards[0]], "evaluate", context.deadline, watch)[0]
