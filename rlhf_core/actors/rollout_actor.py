"""One vLLM engine as a Ray actor: generates, commits its shard, receives weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.jobs import GenerateJob, StageResult
from rlhf_core.arrays import ragged
from rlhf_core.buffer import StageWriter
from rlhf_core.engines.vllm_engine import EngineSettings, FinishedGroup, Sampling, VllmEngine
from rlhf_core.engines.weights import BucketSpec
from rlhf_core.manifests import Shard
from rlhf_core.metrics import Max, Mean, Metric, Min, Std, Sum
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.table import PromptTable
from rlhf_core.schema import ROLLOUTS, check_table


class RolloutActor(Fenced):
    """Holds one engine. ``store`` is where shards go."""

    def __init__(self, name: str, settings: EngineSettings, store: ObjectStore) -> None:
        super().__init__(name)
        self.store = store
        self.engine = VllmEngine(settings)
        self._prompts: dict[str, PromptTable] = {}

    def status(self) -> dict[str, Any]:
        """As in Fenced, with the policy version that the engine serves (None: none)."""
        return super().status() | {"version": self.engine.version}

    def generate(self, epoch: int, job: GenerateJob) -> StageResult:
        """Sample the job's prompts and write one shard of rollouts, group after group."""
        self.require_epoch(epoch)
        started = time.monotonic()
        prompts = self._table(job.prompts).at(list(job.prompt_rows))
        ids = [p["prompt_ids"] for p in prompts]
        groups = sorted(self.engine.generate(ids, job.sampling, job.version, job.seed), key=lambda g: g.index)
        seconds = time.monotonic() - started
        table = _rollouts(job, prompts, groups, self.name)
        check_table(table, ROLLOUTS)
        writer = StageWriter(self.store, job.run, job.iteration, "generate", job.attempt)
        shard = writer.write_shard(table, job.first_group * job.sampling.samples)
        return StageResult((shard,), _metrics(groups, self.name, seconds), seconds)

    def evaluate(self, epoch: int, version: int, prompts: Shard, sampling: Sampling, seed: int) -> pa.Table:
        """Sample all prompts of a table: ``prompt_id``, ``response_ids``, ``finish_reason``; nothing is stored."""
        self.require_epoch(epoch)
        table = self._table(prompts)
        records = table.at(list(range(table.rows)))
        groups = sorted(
            self.engine.generate([r["prompt_ids"] for r in records], sampling, version, seed), key=lambda g: g.index
        )
        return pa.table(
            {
                "prompt_id": [records[g.index]["prompt_id"] for g in groups for _ in g.token_ids],
                "response_ids": pa.array([t for g in groups for t in g.token_ids], type=pa.list_(pa.int32())),
                "finish_reason": [reason for g in groups for reason in g.finish_reasons],
            }
        )

    def sequence_logprobs(self, epoch: int, version: int, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logprobs at temperature 1 of each sequence's tokens after the first."""
        self.require_epoch(epoch)
        return self.engine.sequence_logprobs(sequences, version)

    def begin_update(self, epoch: int) -> None:
        """Open a weight update; the engine serves nothing until it is finished."""
        self.require_epoch(epoch)
        self.engine.wake(("weights",))
        self.engine.begin_update()

    def load_bucket(self, epoch: int, spec: BucketSpec, payload: Any) -> None:
        """Load one bucket: a uint8 array, or a CUDA IPC handle."""
        self.require_epoch(epoch)
        self.engine.load_bucket(spec, payload)

    def finish_update(self, epoch: int, version: int, digest: str) -> str:
        """Close the update and serve ``version``; IntegrityError unless the weights' digest is ``digest``."""
        self.require_epoch(epoch)
        received = self.engine.finish_update(version, digest)
        self.engine.wake()
        return received

    def sleep(self, epoch: int, discard_weights: bool) -> None:
        """Give GPU memory to the trainer; on CPU nothing happens."""
        self.require_epoch(epoch)
        self.engine.sleep(discard_weights)

    def _table(self, shard: Shard) -> PromptTable:
        if shard.key not in self._prompts:
            self._prompts[shard.key] = PromptTable(self.store, shard)
        return self._prompts[shard.key]


def _rollouts(job: GenerateJob, prompts: list[dict[str, Any]], groups: list[FinishedGroup], engine: str) -> pa.Table:
    """Rows in the order of groups and samples; ``group`` counts over the whole iteration."""
    per_row = [(g, s) for g in groups for s in range(job.sampling.samples)]
    responses = [g.token_ids[s] for g, s in per_row]
    lengths = np.asarray([len(r) for r in responses], dtype=np.int64)
    tokens = np.asarray([t for r in responses for t in r], dtype=np.int32)
    logprobs = np.asarray([x for g, s in per_row for x in g.logprobs[s]], dtype=np.float32)
    rows, group = len(per_row), [job.first_group + g.index for g, _ in per_row]
    columns = {
        "sample_id": [f"{job.iteration:06d}-{n:05d}-{s:03d}" for n, (_, s) in zip(group, per_row, strict=True)],
        "prompt_id": [prompts[g.index]["prompt_id"] for g, _ in per_row],
        "group": group,
        "sample": [s for _, s in per_row],
        "prompt_ids": [prompts[g.index]["prompt_ids"] for g, _ in per_row],
        "response_ids": ragged(tokens, lengths),
        "logprobs": ragged(logprobs, lengths),
        "action_mask": ragged(np.ones(len(tokens), dtype=np.uint8), lengths),
        "policy_version": [job.version] * rows,
        "attempt": [job.attempt] * rows,
        "engine": [engine] * rows,
        "finish_reason": [g.finish_reasons[s] for g, s in per_row],
        "queued_seconds": [None] * rows,
        "seconds": [g.seconds for g, _ in per_row],
    }
    return pa.table(columns, schema=ROLLOUTS)


def _metrics(groups: list[FinishedGroup], engine: str, seconds: float) -> dict[str, Metric]:
    lengths = [len(tokens) for g in groups for tokens in g.token_ids]
    reasons = [reason for g in groups for reason in g.finish_reasons]
    return {
        "generate/tokens": Sum(float(sum(lengths))),
        "generate/engine_seconds": Max(seconds),
        "generate/response_length": Mean(float(sum(lengths)), float(len(lengths))),
        "generate/response_length_std": Std.of([float(n) for n in lengths]),
        "generate/response_length_max": Max(float(max(lengths, default=0))),
        "generate/response_length_min": Min(float(min(lengths, default=0))),
        "generate/finished_fraction": Mean(float(reasons.count("stop")), float(len(reasons))),
        "generate/truncated_fraction": Mean(float(reasons.count("length")), float(len(reasons))),
    }
