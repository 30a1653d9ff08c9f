"""A reward worker as a Ray actor: decodes responses, calls the reward functions, writes its shard."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pyarrow as pa

from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.jobs import EvaluateJob, ScoreJob, StageResult
from rlhf_core.actors.watched_store import WatchedStore
from rlhf_core.buffer import StageWriter, read_rows
from rlhf_core.config.data import RewardConfig
from rlhf_core.manifests import Shard
from rlhf_core.metrics import Mean, Metric, Std, Sum
from rlhf_core.models.tokenizer import text_tokenizer
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.table import PromptTable
from rlhf_core.rewards.host import Conditions
from rlhf_core.rewards.scorer import Rows, Scorer
from rlhf_core.rewards.scoring import ScoredBatch
from rlhf_core.schema import COMPONENT, check_table, rewards_schema


class RewardActor(Fenced):
    """``model`` is the policy's folder: its tokenizer turns token ids back into text."""

    def __init__(self, name: str, model: str, store: ObjectStore) -> None:
        super().__init__(name)
        self.store = WatchedStore(store, self.progress)
        self.tokenizer = text_tokenizer(model)
        self._prompts: dict[str, PromptTable] = {}
        self._scorer: tuple[int, Scorer] | None = None

    def score(self, epoch: int, job: ScoreJob) -> StageResult:
        """Score the job's rows and write one shard of the ``rewards`` column group."""
        self.require_epoch(epoch)
        started = time.monotonic()
        columns = ["sample_id", "prompt_id", "response_ids", "finish_reason"]
        rollouts = read_rows(self.store, [job.rollouts], columns=columns, rows=job.rows)
        scorer, sample_ids = self._scorer_for(epoch, job.reward, job.conditions), rollouts["sample_id"].to_pylist()
        rows = self._rows(job.reward, job.prompts, sample_ids, rollouts)
        scored = scorer.score(rows)
        table = pa.table(
            {
                "sample_id": sample_ids,
                "reward": scored.rewards,
                "status": scored.status,
                "error": scored.error,
                "response_text": rows.completions,
                **{f"{COMPONENT}{n}": scored.components[n] for n in scorer.names},
            },
            schema=rewards_schema(scorer.names),
        )
        check_table(table, table.schema)
        writer = StageWriter(self.store, job.run, job.iteration, "score", job.attempt)
        shard = writer.write_shard(table, job.rows.start)
        return StageResult((shard,), _metrics(scored), time.monotonic() - started)

    def score_tables(self, epoch: int, job: EvaluateJob, *responses: pa.Table) -> dict[str, Any]:
        """Score this worker's rows of what ``RolloutActor.evaluate`` of all engines returned, one table after the other: the
        metrics, and a few samples to look at."""
        self.require_epoch(epoch)
        table = pa.concat_tables(responses).slice(job.rows.start, len(job.rows))
        rows = self._rows(job.reward, job.prompts, [f"evaluation-{row}" for row in job.rows], table)
        scored = self._scorer_for(epoch, job.reward, job.conditions).score(rows)
        shown = zip(rows.prompts, rows.answers, rows.completions, scored.rewards, strict=True)
        samples = [{"prompt": p, "answer": a, "response": c, "reward": r} for p, a, c, r in islice(shown, 8)]
        return {"metrics": _metrics(scored), "samples": samples}

    def close(self) -> None:
        """End the processes of the functions; they end with this process too."""
        if self._scorer is not None:
            self._scorer[1].close()
            self._scorer = None

    def _rows(self, reward: RewardConfig, prompts: Shard, sample_ids: list[str], table: pa.Table) -> Rows:
        records, token_ids = (
            self._table(prompts).by_id(table["prompt_id"].to_pylist()),
            table["response_ids"].to_pylist(),
        )
        return Rows(
            sample_ids=sample_ids,
            prompts=[r["prompt_text"] for r in records],
            completions=self.tokenizer.decode_batch(token_ids, skip_special_tokens=not reward.special_tokens),
            answers=[r["answer"] for r in records],
            metadata=[r["metadata"] for r in records],
            completion_ids=token_ids,
            finish_reasons=table["finish_reason"].to_pylist(),
        )

    def _scorer_for(self, epoch: int, reward: RewardConfig, conditions: Conditions) -> Scorer:
        """The functions, imported once. Anew for another driver, since people repair things between two commands, and after a
        file that they come from has changed."""
        if self._scorer is not None:
            old, scorer = self._scorer
            if (old, scorer.config, scorer.conditions) == (epoch, reward, conditions) and scorer.is_current():
                return scorer
            self.close()
        self._scorer = epoch, Scorer(reward, conditions, self.progress)
        return self._scorer[1]

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
