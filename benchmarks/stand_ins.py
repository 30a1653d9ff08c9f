"""In-process stand-ins for a run's actors: they write real, tiny shards and make their figures up. For benchmarks/long_run.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.actors.checkpointing import Room, SavedCheckpoint
from rlhf_core.actors.jobs import ExperienceJob, GenerateJob, ScoreJob, StageResult, UpdateJob
from rlhf_core.algorithms.parity import ParityRows, PlainLogprobs
from rlhf_core.arrays import ragged
from rlhf_core.buffer import StageWriter, read_rows
from rlhf_core.config import RunConfig
from rlhf_core.config.learning import LearnSettings
from rlhf_core.manifests import ClusterRef, Shard, StageManifest, StoredFile
from rlhf_core.metrics import Max, Mean, Metric
from rlhf_core.prompts.table import PromptTable
from rlhf_core.records import digest
from rlhf_core.schema import ROLLOUTS, experience_schema, rewards_schema
from rlhf_core.segments import prepare_segment, rollout_metrics

EXPERIENCE_METRICS = ("advantages/learning_fraction", *(f"mismatch/made_up_{n}" for n in range(9)))
UPDATE_METRICS = ("update/entropy", "update/grad_norm", *(f"policy/made_up_{n}" for n in range(11)))


@dataclass
class Held:
    """What the stand-ins hold between calls."""

    prompts: PromptTable | None = None
    saved: dict[int, SavedCheckpoint] = field(default_factory=dict)


class StandIns:
    """Answers what an ActorGroup is asked for, at once and in this process."""

    def __init__(self, names: Sequence[str], store: Any, held: Held) -> None:
        self.names, self.store, self.held = tuple(names), store, held

    @property
    def handles(self) -> list[str]:
        return list(self.names)

    def call(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        return self.call_each(method, [arguments] * len(self.names), seconds=seconds)

    def call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, seconds: float, beside: object = None
    ) -> list[Any]:
        return [getattr(self, f"on_{method}")(place, *each) for place, each in enumerate(arguments)]

    call_surviving = call_each

    def call_status(self, seconds: float) -> list[dict[str, int]]:
        return [{"version": 0} for _ in self.names]

    def on_nothing(self, place: int, *_: Any) -> None:
        """Calls that only matter to weights and devices."""

    on_upload_leftovers = on_reload = on_begin_update = on_finish_update = on_nothing

    def on_generate(self, place: int, job: GenerateJob) -> StageResult:
        if self.held.prompts is None:
            self.held.prompts = PromptTable(self.store, job.prompts)
        table = rollouts_of(job, self.held.prompts.at(list(job.prompt_rows)), self.names[place])
        writer = StageWriter(self.store, job.run, job.iteration, "generate", job.attempt)
        shard, data = prepare_segment(writer, table, job.identity)
        self.store.put(shard.key, data)
        metrics = {**rollout_metrics(table), "generate/engine_seconds": Max(0.01), "generate/flush_seconds": Max(0.01)}
        return StageResult((shard,), metrics, 0.01)

    def on_score(self, place: int, job: ScoreJob) -> StageResult:
        ids = read_rows(self.store, [job.rollouts], ["sample_id"], job.rows)["sample_id"].to_pylist()
        rewards = [float(n % 2) for n in range(len(ids))]
        columns = {
            "sample_id": ids,
            "reward": rewards,
            "status": ["ok"] * len(ids),
            "error": [None] * len(ids),
            "response_text": ["an answer"] * len(ids),
            "component/exact": rewards,
        }
        table = pa.table(columns, schema=rewards_schema(["exact"]))
        names = ("reward/mean", "reward/std", "reward/failed_infra", "reward/invalid_data", "reward/component_exact")
        return self._result(job, "score", table, job.rows.start, made_up(names, job.iteration))

    def on_experience(self, place: int, job: ExperienceJob) -> StageResult:
        rows = job.rollouts.rows
        first, last = rows * place // len(self.names), rows * (place + 1) // len(self.names)
        part = read_rows(self.store, [job.rollouts, job.rewards], ["sample_id", "response_ids"], range(first, last))
        lengths = part["response_ids"].combine_chunks().value_lengths().to_numpy()
        values = np.ones(int(lengths.sum()), dtype=np.float32)
        columns = {
            "sample_id": part["sample_id"],
            "old_logprobs": ragged(-values, lengths),
            "advantages": ragged(values, lengths),
        }
        table = pa.table(columns, schema=experience_schema(False))
        return self._result(job, "advantages", table, first, made_up(EXPERIENCE_METRICS, job.iteration))

    def on_update(self, place: int, job: UpdateJob) -> StageResult:
        return StageResult((), made_up(UPDATE_METRICS, job.iteration), 0.01, digest(f"v{job.version + 1}".encode()))

    def on_push(self, place: int, version: int, sink: object, bucket: int) -> dict[str, float]:
        return {"seconds": 0.01, "bytes": 1e6}

    def on_weights_digest(self, place: int, version: int) -> str:
        return digest(f"v{version}".encode())

    def on_plain_logprobs(self, place: int, rows: ParityRows) -> PlainLogprobs | None:
        zeros = [np.zeros(len(response)) for response in rows.responses]
        return PlainLogprobs(zeros, zeros) if place == 0 else None

    def on_layout_logprobs(
        self, place: int, version: int, rows: ParityRows, learn: LearnSettings
    ) -> dict[int, np.ndarray]:
        return {row: np.zeros(len(response)) for row, response in enumerate(rows.responses)}

    def on_probe(
        self, place: int, version: int, rollouts: StageManifest, rows: int, learn: LearnSettings
    ) -> list[np.ndarray] | None:
        responses = read_rows(self.store, [rollouts], ["response_ids"], range(rows))["response_ids"].to_pylist()
        return [np.zeros(len(response)) for response in responses] if place == 0 else None

    def on_sequence_logprobs(self, place: int, version: int, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.zeros(len(sequence) - 1) for sequence in sequences]

    def on_checkpoint_room(self, place: int) -> Room:
        return Room.at(Path.cwd(), 0)

    def on_save_checkpoint(self, place: int, version: int, attempt: str, prefix: str) -> None:
        key, data = f"{prefix}/rank{place}.pt", f"{version} {place}".encode()
        self.store.put(key, data)
        file = StoredFile(path=f"rank{place}.pt", key=key, bytes=len(data), blake3=digest(data))
        self.held.saved[place] = SavedCheckpoint(version, attempt, (file,))

    def on_saved_checkpoint(self, place: int, wait: bool) -> SavedCheckpoint | None:
        return self.held.saved.get(place)

    def on_export(self, place: int, version: int, model: str, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text("{}")

    def _result(
        self, job: ScoreJob | ExperienceJob, stage: str, table: pa.Table, first: int, metrics: dict[str, Metric]
    ) -> StageResult:
        writer = StageWriter(self.store, job.run, job.iteration, stage, job.attempt)
        shard: Shard = writer.write_shard(table, first)
        return StageResult((shard,), metrics, 0.01)


def rollouts_of(job: GenerateJob, prompts: list[dict[str, Any]], engine: str) -> pa.Table:
    """Made-up rollouts of the job's groups."""
    samples, tokens = job.sampling.samples, job.sampling.max_new_tokens
    pairs = [(n, s) for n in range(len(prompts)) for s in range(samples)]
    rows, lengths = len(pairs), np.full(len(pairs), tokens)
    columns = {
        "sample_id": [f"{job.iteration:06d}-{job.groups[n]:05d}-{s:03d}" for n, s in pairs],
        "prompt_id": [prompts[n]["prompt_id"] for n, _ in pairs],
        "group": [job.groups[n] for n, _ in pairs],
        "sample": [s for _, s in pairs],
        "prompt_ids": [prompts[n]["prompt_ids"] for n, _ in pairs],
        "response_ids": ragged(np.arange(rows * tokens, dtype=np.int32) + job.iteration, lengths),
        "logprobs": ragged(-np.ones(rows * tokens, dtype=np.float32), lengths),
        "policy_version": [job.version] * rows,
        "attempt": [job.attempt] * rows,
        "engine": [engine] * rows,
        "finish_reason": ["length"] * rows,
        "seconds": [0.01] * rows,
    }
    return pa.table(columns, schema=ROLLOUTS)


def made_up(names: Sequence[str], iteration: int) -> dict[str, Metric]:
    """Numbers with as many digits as real ones."""
    return {name: Mean(float(np.sin(iteration + n)), 1.0) for n, name in enumerate(names)}


def start_cluster(config: RunConfig, branch: str, epoch: int, device: str | None = None) -> ClusterRef:
    """The names of actors that there are not."""
    return ClusterRef(
        namespace="none",
        branch=branch,
        epoch=epoch,
        trainers=("trainer-0", "trainer-1"),
        engines=("engine-0", "engine-1"),
        rewards=("reward-0",),
    )
