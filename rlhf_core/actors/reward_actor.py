"""A reward worker as a Ray actor: decodes responses, calls the reward functions, writes its shard."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.jobs import ScoreJob, StageResult
from rlhf_core.actors.watched_store import WatchedStore
from rlhf_core.buffer import StageWriter, read_rows
from rlhf_core.config.data import RewardConfig
from rlhf_core.errors import RewardError
from rlhf_core.manifests import Shard
from rlhf_core.metrics import Mean, Metric, Std, Sum
from rlhf_core.models.tokenizer import text_tokenizer
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.table import PromptTable
from rlhf_core.rewards.loading import load_rewards
from rlhf_core.rewards.scoring import LoadedReward, ScoredBatch, score_batch
from rlhf_core.schema import COMPONENT, check_table, rewards_schema


class RewardActor(Fenced):
    """``model`` is the policy's folder: its tokenizer turns token ids back into text."""

    def __init__(self, name: str, model: str, store: ObjectStore) -> None:
        super().__init__(name)
        self.store = WatchedStore(store, self.progress)
        self.tokenizer = text_tokenizer(model)
        self._prompts: dict[str, PromptTable] = {}
        self._rewards: dict[str, list[LoadedReward]] = {}

    def score(self, epoch: int, job: ScoreJob) -> StageResult:
        """Score the job's rows and write one shard of the ``rewards`` column group."""
        self.require_epoch(epoch)
        started = time.monotonic()
        columns = ["sample_id", "prompt_id", "response_ids"]
        rollouts = read_rows(self.store, [job.rollouts], columns=columns, rows=job.rows)
        sample_ids = rollouts["sample_id"].to_pylist()
        texts = self._decode(rollouts["response_ids"])
        scored = self._score(job.reward, job.prompts, sample_ids, rollouts["prompt_id"].to_pylist(), texts)
        names = [f.name for f in self._functions(job.reward)]
        table = pa.table(
            {
                "sample_id": sample_ids,
                "reward": scored.rewards,
                "status": scored.status,
                "error": scored.error,
                "response_text": texts,
                **{f"{COMPONENT}{n}": scored.components[n] for n in names},
            },
            schema=rewards_schema(names),
        )
        check_table(table, table.schema)
        writer = StageWriter(self.store, job.run, job.iteration, "score", job.attempt)
        shard = writer.write_shard(table, job.rows.start)
        return StageResult((shard,), _metrics(scored), time.monotonic() - started)

    def score_table(self, epoch: int, reward: RewardConfig, prompts: Shard, responses: pa.Table) -> dict[str, Any]:
        """Score what ``RolloutActor.evaluate`` returned: the metrics, and a few samples to look at."""
        self.require_epoch(epoch)
        texts = self._decode(responses["response_ids"])
        prompt_ids = responses["prompt_id"].to_pylist()
        names = [f"evaluation-{row}" for row in range(len(texts))]
        scored = self._score(reward, prompts, names, prompt_ids, texts)
        records = self._table(prompts).by_id(prompt_ids[:8])
        samples = [
            {"prompt": r["prompt_text"], "answer": r["answer"], "response": text, "reward": value}
            for r, text, value in zip(records, texts[:8], scored.rewards[:8], strict=True)
        ]
        return {"metrics": _metrics(scored), "samples": samples}

    def _score(
        self, reward: RewardConfig, prompts: Shard, sample_ids: list[str], prompt_ids: list[str], texts: list[str]
    ) -> ScoredBatch:
        functions, records = self._functions(reward), self._table(prompts).by_id(prompt_ids)
        merged = ScoredBatch([], [], [], {f.name: [] for f in functions})
        for first in range(0, len(texts), reward.batch_size):
            part = slice(first, first + reward.batch_size)
            scored = self._within(
                reward.timeout_seconds,
                functions,
                sample_ids=sample_ids[part],
                prompts=[r["prompt_text"] for r in records[part]],
                completions=texts[part],
                answers=[r["answer"] for r in records[part]],
                metadata=[r["metadata"] for r in records[part]],
                clip=reward.clip,
            )
            self.progress.count("batch of rows")
            merged.rewards.extend(scored.rewards)
            merged.status.extend(scored.status)
            merged.error.extend(scored.error)
            for name, values in scored.components.items():
                merged.components[name].extend(values)
        return merged

    def _within(self, seconds: float, functions: list[LoadedReward], **batch: Any) -> ScoredBatch:
        """``score_batch`` with a deadline. Python cannot end a thread: one that hangs is left behind, and the run stops."""
        future = ThreadPoolExecutor(1).submit(score_batch, functions, **batch)
        try:
            with self.progress.waiting("the reward functions", seconds):
                return future.result(timeout=seconds)
        except TimeoutError:
            names = ", ".join(f.name for f in functions)
            first, last = batch["sample_ids"][0], batch["sample_ids"][-1]
            raise RewardError(
                f"reward functions {names}: no answer within {seconds:g} s (reward.timeout_seconds) for samples {first} to "
                f"{last}; make them faster, raise the limit, or lower reward.batch_size = {len(batch['sample_ids'])}"
            ) from None

    def _decode(self, column: pa.ChunkedArray) -> list[str]:
        return self.tokenizer.decode_batch(column.to_pylist(), skip_special_tokens=True)

    def _functions(self, reward: RewardConfig) -> list[LoadedReward]:
        key = reward.model_dump_json()
        if key not in self._rewards:
            self._rewards[key] = load_rewards(reward)
        return self._rewards[key]

    def _table(self, shard: Shard) -> PromptTable:
        if shard.key not in self._prompts:
            self._prompts[shard.key] = PromptTable(self.store, shard)
        return self._prompts[shard.key]


def _metrics(scored: ScoredBatch) -> dict[str, Metric]:
    known = [r for r in scored.rewards if r is not None]
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(sum(known), float(len(known))),
        "reward/std": Std.of(known),
        "reward/failed_infra": Sum(float(scored.status.count("failed_infra"))),
        "reward/invalid_data": Sum(float(scored.status.count("invalid_data"))),
    }
    for name, values in scored.components.items():
        given = [v for v in values if v is not None]
        metrics[f"reward/component_{name}"] = Mean(sum(given), float(len(given)))
    return metrics
