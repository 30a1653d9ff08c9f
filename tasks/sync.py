"""Stage ``sync``: every engine receives the new weights, proves it, and agrees with the trainer about logprobs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlhf_core.actors.group import ActorGroup
from rlhf_core.actors.weight_push import EngineSink
from rlhf_core.bases import weights_of
from rlhf_core.buffer import read_rows
from rlhf_core.errors import AgreementError
from rlhf_core.manifests import StageManifest
from rlhf_core.metrics import united
from tasks.context import StageContext
from tasks.layouts import learn_settings, probe_bound
from tasks.stage import manifest_of, stage_task


@stage_task("sync", retryable=True)
def sync(context: StageContext) -> StageManifest:
    """Push version iteration + 1 to the engines and compare logprobs of a probe batch."""
    version = context.iteration + 1
    update = context.stage("update")
    weights = str(weights_of(context.store, context.lineage, version))
    metrics = push_weights(context, version, weights)
    metrics = united(metrics, probe(context, version))
    return manifest_of(
        context,
        "sync",
        policy_version=version,
        parents={"update": update.digest},
        metrics=metrics,
        details={"engines": list(context.cluster.engines), "weights_digest": weights},
    )


def push_weights(context: StageContext, version: int, digest: str) -> dict[str, float]:
    """Gather the policy on the ranks and load it into every engine; each must report exactly ``digest``."""
    started = time.monotonic()
    trainers, engines = context.trainers, context.engines
    trainers.call("reload", seconds=context.deadline)  # they may be away after a sync that was cut off
    engines.call("begin_update", seconds=context.deadline)
    sinks = _sinks(context, trainers, engines)
    bucket = context.config.sync.bucket_mib << 20
    jobs = [(version, sink, bucket) for sink in sinks]
    results = trainers.call_each("push", jobs, seconds=context.deadline, beside=engines)
    engines.call("finish_update", version, digest, seconds=context.deadline)
    return {
        "sync/push_seconds": time.monotonic() - started,
        "sync/bytes": sum(r["bytes"] for r in results),
    }


def _sinks(context: StageContext, trainers: ActorGroup, engines: ActorGroup) -> list[EngineSink]:
    """Which rank serves which engine. On shared GPUs each rank serves the engine beside it; else rank 0 serves all."""
    handles, ranks, resources = engines.handles, len(trainers.names), context.config.resources
    shared = context.cluster.device == "gpu" and resources.colocate and resources.tensor_parallel == 1
    if shared and len(handles) <= ranks:
        return [
            EngineSink((handles[r],) if r < len(handles) else (), "cuda_ipc", context.deadline) for r in range(ranks)
        ]
    return [EngineSink(tuple(handles) if r == 0 else (), "object_store", context.deadline) for r in range(ranks)]


def probe(context: StageContext, version: int) -> dict[str, float]:
    """Mean and maximum absolute logprob difference between trainer and engines on rollouts of this iteration.

    Both at temperature 1, over the response tokens; the trainer in the layout of its updates. AgreementError, with the figures,
    above the tolerance.
    """
    count = min(context.config.sync.probe_sequences, context.config.rows)
    if not count:
        return {}
    rollouts = context.stage("generate")
    learn = learn_settings(context, context.config)
    trained = context.trainers.call("probe", version, rollouts, count, learn, seconds=context.deadline)[0]
    table = read_rows(context.store, [rollouts], columns=["prompt_ids", "response_ids"], rows=range(count))
    prompts, responses = table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist()
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    answers = context.engines.call("sequence_logprobs", version, sequences, seconds=context.deadline)
    tolerance = probe_bound(context)
    worst: dict[str, Any] = {"mean": 0.0, "max": 0.0}
    for engine, scores in zip(context.cluster.engines, answers, strict=True):
        served = [s[len(p) - 1 :] for s, p in zip(scores, prompts, strict=True)]
        gap = np.abs(np.concatenate([s - t[: len(s)] for s, t in zip(served, trained, strict=True)]))
        mean, largest = float(gap.mean()), float(gap.max())
        if not mean <= tolerance:
            raise AgreementError(
                f"after the sync to policy version {version}, {engine} and the trainer differ by {mean:.5f} on average and "
                f"{largest:.5f} at most over {len(gap)} tokens; the tolerance for {context.config.model.dtype} is "
                f"{tolerance:.5f} (sync.tolerance). The engine does not serve what the trainer holds."
            )
        worst = {"mean": max(worst["mean"], mean), "max": max(worst["max"], largest)}
    return {"sync/probe_gap": worst["mean"], "sync/probe_gap_max": worst["max"]}
