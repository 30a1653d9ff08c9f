"""Combining what several functions say of the same rows. What a function could not score is a status, never a 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.errors import RewardError
from rlhf_core.rewards.contract import Answer, Status

#: Why a row has no reward about which every function abstained.
NOTHING_SAID = "no reward function had anything to say"


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of N rows, as parallel lists of length N."""

    rewards: list[float | None]
    """Weighted sum of the components, clipped; None where the status is not `ok`."""
    status: list[Status]
    error: list[str | None]
    """Why there is no reward, naming the function."""
    components: dict[str, list[float | None]]
    """Value of each function before weight and clip; None where it had none, or nothing to say."""


def combine(
    answers: Mapping[str, Sequence[Answer]], weights: Mapping[str, float], sample_ids: Sequence[str], clip: float | None
) -> ScoredBatch:
    """From the answers of each function (lists of length N) to rewards: clip(sum of weight * value).

    A function that abstained (None) counts neither in the sum nor against the row; a row about which all abstained is
    `invalid_data` with ``NOTHING_SAID`` as the reason. A row that any function could not score has no reward; if the functions
    disagree on the reason, `invalid_data` wins, since asking again cannot help it. RewardError if a sum overflows.
    """
    totals, said = [0.0] * len(sample_ids), [False] * len(sample_ids)
    status: list[Status] = ["ok"] * len(sample_ids)
    errors: list[str | None] = [None] * len(sample_ids)
    for name, given in answers.items():
        for row, answer in enumerate(given):
            if answer is None:
                continue
            said[row] = True
            if answer.value is not None:
                totals[row] += weights[name] * answer.value
            elif status[row] == "ok" or (status[row], answer.status) == ("failed_infra", "invalid_data"):
                status[row] = answer.status
                errors[row] = f"{name}: {answer.error or 'no reason given'}"
    for row, (sample, total) in enumerate(zip(sample_ids, totals, strict=True)):
        if not said[row]:
            status[row], errors[row] = "invalid_data", NOTHING_SAID
        if not math.isfinite(total):
            raise RewardError(f"the weighted sum of the rewards of sample {sample} is {total}: use smaller weights")
    return ScoredBatch(
        rewards=[_clipped(t, clip) if s == "ok" else None for t, s in zip(totals, status, strict=True)],
        status=status,
        error=errors,
        components={name: [None if a is None else a.value for a in given] for name, given in answers.items()},
    )


def _clipped(total: float, clip: float | None) -> float:
    return total if clip is None else max(-clip, min(clip, total))
