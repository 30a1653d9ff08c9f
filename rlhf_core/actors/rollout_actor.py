"""One vLLM engine as a Ray actor: generates, commits its shard, receives weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.jobs import GenerateJob, StageResult
from rlhf_core.actors.one_thread import on_one_thread
from rlhf_core.actors.stream import SegmentStream, upload_leftovers
from rlhf_core.actors.watched_store import WatchedStore
from rlhf_core.arrays import ragged
from rlhf_core.buffer import StageWriter
from rlhf_core.engines.vllm_engine import EngineSettings, FinishedGroup, Sampling, VllmEngine
from rlhf_core.engines.weights import BucketSpec
from rlhf_core.manifests import Shard
from rlhf_core.metrics import Max, Metric, merge_metrics
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.table import PromptTable
from rlhf_core.schema import ROLLOUTS
from rlhf_core.seeds import evaluation_seeds, rollout_seeds
from rlhf_core.segments import prepare_segment, rollout_metrics


@dataclass(frozen=True)
class Staging:
    """Where finished groups wait for the store: a folder of this actor's own, and how much may wait, in bytes."""

    folder: Path
    budget: int
    flush_seconds: float


#: A token id and a logprob as Python objects, and their bytes in a staged segment.
_BYTES_PER_TOKEN = 100


@on_one_thread
class RolloutActor(Fenced):
    """Holds one engine. ``store`` is where segments go."""

    def __init__(self, name: str, settings: EngineSettings, store: ObjectStore, staging: Staging) -> None:
        super().__init__(name)
        self.store, self.staging = WatchedStore(store, self.progress), staging
        self.engine = VllmEngine(settings, self.progress)
        self._prompts: dict[str, PromptTable] = {}

    def status(self) -> dict[str, Any]:
        """As in Fenced, with the policy version that the engine serves (None: none) and the digest of its weights."""
        return super().status() | {"version": self.engine.version, "digest": self.engine.digest}

    def claim(self, epoch: int) -> dict[str, Any]:
        """As in Fenced. What runs for an older driver ends; its finished groups become durable."""
        if epoch > self.epoch:
            self.engine.interrupt()
        return super().claim(epoch)

    def upload_leftovers(self, epoch: int) -> int:
        """Upload what earlier processes of this name finished here but could not bring into the store; how many segments."""
        self.require_epoch(epoch)
        return upload_leftovers(self.store, self.staging.folder)

    def generate(self, epoch: int, job: GenerateJob) -> StageResult:
        """Sample the job's prompts; finished groups become durable segments while the others run.

        A driver that takes the actor over ends the call: FencedOut, after what was finished is durable.
        """
        self.require_epoch(epoch)
        started = time.monotonic()
        prompts = self._table(job.prompts).at(list(job.prompt_rows))
        writer = StageWriter(self.store, job.run, job.iteration, "generate", job.attempt)
        measured: list[dict[str, Metric]] = []

        def prepare(groups: list[FinishedGroup]) -> tuple[Shard, bytes]:
            table = _rollouts(job, prompts, sorted(groups, key=lambda g: g.index), self.name)
            measured.append(rollout_metrics(table))
            return prepare_segment(writer, table, job.identity)

        stream: SegmentStream[FinishedGroup] = SegmentStream(
            self.store,
            prepare,
            folder=self.staging.folder,
            budget=self.staging.budget,
            flush_seconds=self.staging.flush_seconds,
            size=_waiting_bytes,
        )
        try:
            for groups in self._sample(job, prompts):
                self.require_epoch(epoch)
                stream.add(groups)
        except BaseException:
            stream.finish()  # what is finished is worth keeping
            raise
        seconds = time.monotonic() - started
        shards = stream.finish()
        metrics = merge_metrics([*measured, {"generate/engine_seconds": Max(seconds)}])
        metrics["generate/flush_seconds"] = Max(time.monotonic() - started - seconds)
        return StageResult(shards, metrics, seconds)

    def _sample(self, job: GenerateJob, prompts: list[dict[str, Any]]) -> Iterator[list[FinishedGroup]]:
        """Groups that belong into one segment, as they finish."""
        ids = [p["prompt_ids"] for p in prompts]
        seeds = [rollout_seeds(job.seed, job.iteration, group, job.sampling.samples) for group in job.groups]
        if not job.exact_groups:
            for group in self.engine.generate(ids, job.sampling, job.version, seeds):
                yield [group]
            return
        for first in range(0, len(ids), job.exact_groups):
            # Who runs beside whom decides about the last bits of a logprob, so only whole blocks count.
            part = slice(first, first + job.exact_groups)
            block = list(self.engine.generate(ids[part], job.sampling, job.version, seeds[part], apart=True))
            yield [replace(group, index=first + group.index) for group in block]

    def evaluate(
        self, epoch: int, version: int, prompts: Shard, rows: range, sampling: Sampling, seed: int
    ) -> pa.Table:
        """Sample these prompts of a table: ``prompt_id``, ``response_ids``, ``finish_reason``, in the order of the prompts. Nothing
        is stored. ``seed`` is the run's; each sample has a stream of its own, so it does not matter which engine answers."""
        self.require_epoch(epoch)
        records = self._table(prompts).at(list(rows))
        seeds = [evaluation_seeds(seed, version, r["prompt_id"], sampling.samples) for r in records]
        groups = sorted(
            self.engine.generate([r["prompt_ids"] for r in records], sampling, version, seeds), key=lambda g: g.index
        )
        return pa.table(
            {
                "prompt_id": pa.array(
                    [records[g.index]["prompt_id"] for g in groups for _ in g.token_ids], type=pa.string()
                ),
                "response_ids": pa.array([t for g in groups for t in g.token_ids], type=pa.list_(pa.int32())),
                "finish_reason": pa.array([r for g in groups for r in g.finish_reasons], type=pa.string()),
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

    def wake(self, epoch: int) -> None:
        """Take GPU memory again after ``sleep`` without discarding."""
        self.require_epoch(epoch)
        self.engine.wake()

    def _table(self, shard: Shard) -> PromptTable:
        if shard.key not in self._prompts:
            self._prompts[shard.key] = PromptTable(self.store, shard)
        return self._prompts[shard.key]


def _rollouts(job: GenerateJob, prompts: list[dict[str, Any]], groups: list[FinishedGroup], engine: str) -> pa.Table:
    """Rows in the order of groups and samples; ``group`` counts over the whole iteration."""
    per_row = [(g, s) for g in groups for s in range(job.sampling.samples)]
    responses = [g.token_ids[s] for g, s in per_row]
    lengths = np.asarray([len(r) for r in responses], dtype=np.int64)
    count = int(lengths.sum())
    tokens = np.fromiter(chain.from_iterable(responses), dtype=np.int32, count=count)
    scores = chain.from_iterable(g.logprobs[s] for g, s in per_row)
    logprobs = np.fromiter(scores, dtype=np.float32, count=count)
    rows, group = len(per_row), [job.groups[g.index] for g, _ in per_row]
    columns = {
        "sample_id": [f"{job.iteration:06d}-{n:05d}-{s:03d}" for n, (_, s) in zip(group, per_row, strict=True)],
        "prompt_id": [prompts[g.index]["prompt_id"] for g, _ in per_row],
        "group": group,
        "sample": [s for _, s in per_row],
        "prompt_ids": [prompts[g.index]["prompt_ids"] for g, _ in per_row],
        "response_ids": ragged(tokens, lengths),
        "logprobs": ragged(logprobs, lengths),
        "policy_version": [job.version] * rows,
        "attempt": [job.attempt] * rows,
        "engine": [engine] * rows,
        "finish_reason": [g.finish_reasons[s] for g, s in per_row],
        "seconds": [g.seconds for g, _ in per_row],
    }
    return pa.table(columns, schema=ROLLOUTS)


def _waiting_bytes(group: FinishedGroup) -> int:
    """Memory of a group that waits to become durable: token ids and logprobs as Python objects."""
    return _BYTES_PER_TOKEN * sum(len(tokens) for tokens in group.token_ids)
