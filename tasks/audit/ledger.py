"""The ledger of an iteration, recomputed from its rows: what was sampled, scored, trained, left out and why.

Works on the few columns that decide, one shard at a time, so that an iteration's tokens are never in memory together.
Shapes: N rows of an iteration, in the order of groups and samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlhf_core.config.learning import AlgorithmConfig
from rlhf_core.manifests import Shard
from rlhf_core.schema import COMPONENT, ROLLOUTS, check_table, experience_schema, rewards_schema, without_deprecated
from rlhf_core.views import EpochUse

#: Why a sample taught nothing.
NO_TOKENS = "no response tokens"
TOO_FEW = "fewer than two scored samples in its group"
EQUAL = "all rewards of its group are equal"
AT_MEAN = "its reward is the mean of its group"
SKIPPED = "a guard skipped the batch"

#: float32 holds 7 digits; the sums of the estimator are made in float64, in another order than here.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6

Columns = dict[str, Any]


@dataclass
class Account:
    """Where the samples of an iteration went. Every sample is in exactly one of the counts below ``tokens``."""

    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    retired: int = 0
    unproven: int = 0
    skipped: str | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(stage, what contradicts the records)."""


@dataclass(frozen=True)
class Plan:
    """What an iteration has to consist of."""

    iteration: int
    prompt_ids: Sequence[str] | None
    """Of its groups in order; None if the prompt table is damaged."""
    groups: int
    samples: int
    """Samples of a group."""


@dataclass(frozen=True)
class Training:
    """How the rows were used."""

    algorithm: AlgorithmConfig
    """Of the branch that the advantages belong to."""
    reference: bool
    """Whether the update had a KL term: then rows without an advantage teach something too."""
    state: Literal["trained", "waiting", "unproven"]
    """Of the iteration's update."""
    skipped: str | None = None


def project(stage: str, table: Any) -> Columns:
    """The columns of a shard that the ledger needs, after the check of its schema. ValueError says what is wrong."""
    ids = table["sample_id"].to_pylist() if "sample_id" in table.column_names else []
    if stage == "generate":
        check_table(without_deprecated(table), ROLLOUTS)
        numbers = {name: table[name].to_numpy() for name in ("group", "sample", "policy_version")}
        lengths = [np.diff(offsets) for _, offsets in _lists(table["response_ids"])]
        return {"ids": ids, "prompt_ids": table["prompt_id"].to_pylist(), **numbers, "tokens": _joined(lengths)}
    if stage == "score":
        names = [n.removeprefix(COMPONENT) for n in table.column_names if n.startswith(COMPONENT)]
        check_table(table, rewards_schema(names))
        return {
            "ids": ids,
            "reward": table["reward"].to_numpy(),
            "status": np.array(table["status"].to_pylist(), object),
        }
    if stage == "advantages":
        check_table(table, experience_schema("ref_logprobs" in table.column_names))
        parts = [_advantages(values, offsets) for values, offsets in _lists(table["advantages"])]
        columns = {name: _joined([part[name] for part in parts]) for name in ("tokens", "nonzero", "advantage", "even")}
        return {"ids": ids, **columns}
    return {"ids": ids}


def assemble(shards: Sequence[Shard], parts: Sequence[Columns]) -> Columns:
    """The columns of all shards in the order of the stage. ValueError if the rows are not there exactly once."""
    if not parts:
        raise ValueError("it names no shards")
    positions = _joined([_positions(shard) for shard in shards]).astype(np.int64)
    order = np.argsort(positions, kind="stable")
    wrong = np.flatnonzero(positions[order] != np.arange(len(order)))
    if len(wrong):
        raise ValueError(f"its shards do not hold every row exactly once: row {wrong[0]} is missing or there twice")
    columns: Columns = {}
    for name in parts[0]:
        if isinstance(parts[0][name], list):
            joined = [value for part in parts for value in part[name]]
            columns[name] = [joined[row] for row in order]
        else:
            columns[name] = np.concatenate([part[name] for part in parts])[order]
    return columns


def account(
    plan: Plan, rollouts: Columns, rewards: Columns | None, experience: Columns | None, training: Training
) -> Account:
    """The ledger of an iteration whose rollouts are intact. Rewards and experience are None where they are not (yet)."""
    result = Account(
        prompts=len(set(rollouts["group"].tolist())),
        samples=len(rollouts["ids"]),
        tokens=int(rollouts["tokens"].sum()),
        skipped=training.skipped,
    )
    result.problems += (("generate", text) for text in _sampling_problems(plan, rollouts))
    for stage, columns in (("score", rewards), ("advantages", experience)):
        if columns is not None and columns["ids"] != rollouts["ids"]:
            result.problems.append((stage, _other_ids(rollouts["ids"], columns["ids"])))
            training = _unproven(training)
    if training.state == "waiting":
        result.waiting = result.samples
    elif training.state == "unproven" or rewards is None or experience is None:
        result.unproven = result.samples
    else:
        result.problems += (
            ("advantages", text) for text in _advantage_problems(rollouts, rewards, experience, training)
        )
        reasons = _fates(rollouts, rewards, experience, training)
        names, counts = np.unique(reasons.astype(str), return_counts=True)
        found = dict(zip(names.tolist(), counts.tolist(), strict=True))
        result.trained = found.pop("", 0)
        result.left_out = found
    return result


class PromptUse:
    """Counts how often each prompt of a table was used, epoch after epoch. Holds the epochs that are not over yet."""

    def __init__(self) -> None:
        self.finished: list[EpochUse] = []
        self._stream: tuple[Any, ...] = ()
        self._table = ""
        self._counts: dict[int, np.ndarray] = {}

    def add(self, table: Shard, seed: int, first: int, rows: Sequence[int]) -> None:
        """The prompts of one iteration: ``first`` counts the prompts of all iterations before it."""
        stream = (table.blake3, seed, len(rows))
        if stream != self._stream:
            self.flush()
            self._stream, self._table = stream, table.key
        epochs = (first + np.arange(len(rows))) // table.rows
        for epoch in np.unique(epochs).tolist():
            counts = self._counts.setdefault(epoch, np.zeros(table.rows, dtype=np.int32))
            np.add.at(counts, np.asarray(rows)[epochs == epoch], 1)
        self.flush(before=(first + len(rows)) // table.rows)

    def flush(self, before: int | None = None) -> None:
        """Turn the epochs before ``before`` (all by default) into results."""
        for epoch in sorted(e for e in self._counts if before is None or e < before):
            counts = self._counts.pop(epoch)
            self.finished.append(
                EpochUse(
                    table=self._table,
                    epoch=epoch,
                    prompts=len(counts),
                    used=int(counts.sum()),
                    least=int(counts.min()),
                    most=int(counts.max()),
                )
            )


def _sampling_problems(plan: Plan, rollouts: Columns) -> Iterator[str]:
    ids, groups = rollouts["ids"], rollouts["group"]
    wanted = plan.groups * plan.samples
    if len(ids) != wanted:
        yield f"it has {len(ids)} samples, {plan.groups} prompts of {plan.samples} samples each make {wanted}"
    elif not (
        np.array_equal(groups, np.repeat(np.arange(plan.groups), plan.samples))
        and np.array_equal(rollouts["sample"], np.tile(np.arange(plan.samples), plan.groups))
    ):
        yield f"its rows are not {plan.groups} groups of the samples 0 to {plan.samples - 1}, each exactly once"
    elif plan.prompt_ids is not None:
        expected = np.repeat(np.array(plan.prompt_ids, dtype=object), plan.samples)
        differs = np.flatnonzero(expected != np.array(rollouts["prompt_ids"], dtype=object))
        if len(differs):
            row = int(differs[0])
            yield (
                f"its prompts are not those of iteration {plan.iteration}: {len(set(groups[differs].tolist()))} groups "
                f"differ, group {int(groups[row])} is prompt {rollouts['prompt_ids'][row]!r} instead of {expected[row]!r}"
            )
    if len(set(ids)) != len(ids):
        yield f"{len(ids) - len(set(ids))} sample ids are there twice"
    # The iteration is in the id, so ids that are unique inside every iteration are unique in the run.
    prefix = f"{plan.iteration:06d}-"
    strange = next((sample for sample in ids if not sample.startswith(prefix)), None)
    if strange is not None:
        yield f"sample {strange!r} belongs to another iteration: ids of this one begin with {prefix!r}"
    other = np.flatnonzero(rollouts["policy_version"] != plan.iteration)
    if len(other):
        row = int(other[0])
        yield (
            f"{len(other)} samples were not generated with policy version {plan.iteration}: "
            f"{ids[row]!r} with {int(rollouts['policy_version'][row])}"
        )


def _fates(rollouts: Columns, rewards: Columns, experience: Columns, training: Training) -> np.ndarray:
    """[N] the reason why a row was left out; empty for those that were trained. As the trainer decides it."""
    status = rewards["status"]
    reasons = np.full(len(status), "", dtype=object)
    if training.skipped is not None:
        reasons[:] = SKIPPED
        return reasons
    if not training.reference:
        too_few, equal = _uninformative(rollouts["group"], rewards)
        without = experience["nonzero"] == 0
        reasons[without] = AT_MEAN
        reasons[without & equal] = EQUAL
        reasons[without & too_few] = TOO_FEW
    reasons[rollouts["tokens"] == 0] = NO_TOKENS
    failed = status != "ok"
    reasons[failed] = status[failed]
    return reasons


def _advantage_problems(rollouts: Columns, rewards: Columns, experience: Columns, training: Training) -> Iterator[str]:
    """Whether the stored advantages follow from the stored rewards."""
    ids, tokens = rollouts["ids"], rollouts["tokens"]
    lengths = np.flatnonzero(experience["tokens"] != tokens)
    if len(lengths):
        row = int(lengths[0])
        yield f"sample {ids[row]!r} has {int(experience['tokens'][row])} advantages for {int(tokens[row])} tokens"
        return
    uneven = np.flatnonzero(~experience["even"])
    if len(uneven):
        yield f"the advantage of sample {ids[int(uneven[0])]!r} differs from token to token"
        return
    expected = _group_relative(rollouts["group"], rewards, training.algorithm)
    stored = experience["advantage"]
    too_few, equal = _uninformative(rollouts["group"], rewards)
    close = np.isclose(stored, expected, rtol=_RELATIVE, atol=_ABSOLUTE)
    wrong = np.flatnonzero((tokens > 0) & np.where(too_few | equal, stored != 0, ~close))
    if len(wrong):
        row = int(wrong[0])
        yield (
            f"{len(wrong)} advantages do not follow from the rewards: sample {ids[row]!r} has {stored[row]:.6g}, "
            f"its group gives {expected[row]:.6g}"
        )


def _group_relative(groups: np.ndarray, rewards: Columns, algorithm: AlgorithmConfig) -> np.ndarray:
    """[N] float64 GRPO advantages, arXiv 2402.03300: (r - mean) / (std + epsilon), std with ddof = 1; 0 without signal."""
    valid = rewards["status"] == "ok"
    values = np.where(valid, rewards["reward"], 0.0).astype(np.float64)
    size = int(groups.max()) + 1 if len(groups) else 0
    counts = np.bincount(groups, valid, size)
    mean = np.bincount(groups, values, size) / np.maximum(counts, 1)
    centred = np.where(valid, values - mean[groups], 0.0)
    too_few, equal = _uninformative(groups, rewards)
    if algorithm.normalize_std:
        std = np.sqrt(np.bincount(groups, centred**2, size) / np.maximum(counts - 1, 1))
        centred = centred / (std[groups] + algorithm.epsilon)
    return np.where(too_few | equal, 0.0, centred)


def _uninformative(groups: np.ndarray, rewards: Columns) -> tuple[np.ndarray, np.ndarray]:
    """[N] bool each: the row's group has fewer than two scored samples; or more, with equal rewards."""
    valid = rewards["status"] == "ok"
    size = int(groups.max()) + 1 if len(groups) else 0
    lowest, highest = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(lowest, groups[valid], rewards["reward"][valid])
    np.maximum.at(highest, groups[valid], rewards["reward"][valid])
    too_few = np.bincount(groups, valid, size) < 2
    return too_few[groups], (~too_few & (lowest == highest))[groups]


def _unproven(training: Training) -> Training:
    state = training.state if training.state == "waiting" else "unproven"
    return Training(training.algorithm, training.reference, state, training.skipped)


def _other_ids(expected: list[str], found: list[str]) -> str:
    missing = sorted(set(expected) - set(found))
    if missing:
        return f"{len(missing)} samples of the rollouts are not in it, the first is {missing[0]!r}"
    return f"it holds {len(found)} samples in another order than the {len(expected)} rollouts"


def _positions(shard: Shard) -> np.ndarray:
    """[rows] the place of each row in the stage."""
    size, rest = divmod(shard.rows, max(1, len(shard.groups)))
    if not shard.groups or rest:
        return shard.first_row + np.arange(shard.rows)
    return np.repeat(np.asarray(shard.groups, dtype=np.int64) * size, size) + np.tile(
        np.arange(size), len(shard.groups)
    )


def _advantages(values: np.ndarray, offsets: np.ndarray) -> Columns:
    """Of each row: its tokens, how many are not 0, the first value (0 without tokens), whether all are the same."""
    lengths = np.diff(offsets)
    filled = lengths > 0
    first = np.zeros(len(lengths), dtype=np.float64)
    first[filled] = values[offsets[:-1][filled]]
    # NaN != 0 and NaN != NaN: a broken advantage counts as one, and as uneven.
    changes = np.concatenate([[0], np.cumsum(values != np.repeat(first, lengths).astype(values.dtype))])
    nonzero = np.concatenate([[0], np.cumsum(values != 0)])
    return {
        "tokens": lengths,
        "nonzero": nonzero[offsets[1:]] - nonzero[offsets[:-1]],
        "advantage": first,
        "even": changes[offsets[1:]] == changes[offsets[:-1]],
    }


def _lists(column: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunk after chunk of a list column: values, and int64 offsets into them [rows + 1]."""
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy().astype(np.int64)
        yield chunk.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy(), offsets - offsets[0]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
