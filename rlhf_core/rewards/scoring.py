"""Score a batch with several functions. What a function breaks is an error or a status, never a 0."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from rlhf_core.errors import RewardError
from rlhf_core.rewards.contract import RewardResult, Status


@dataclass(frozen=True)
class LoadedReward:
    """A reward function ready to call."""

    name: str
    weight: float
    function: Callable[..., Any]


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of N rows, as parallel lists of length N."""

    rewards: list[float | None]
    """Weighted sum of the components, clipped; None where the status is not `ok`."""
    status: list[Status]
    error: list[str | None]
    """Why there is no reward, naming the function."""
    components: dict[str, list[float | None]]
    """Value of each function before weight and clip."""


def score_batch(
    functions: Sequence[LoadedReward],
    *,
    sample_ids: Sequence[str],
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    clip: float | None,
) -> ScoredBatch:
    """Call every function once with all rows and combine: reward = clip(sum of weight * value).

    A row that any function could not score has no reward; if the functions disagree on the reason, `invalid_data`
    wins, since asking again cannot help it. An exception, a wrong length, or a value that is no finite number is a
    RewardError with the function, the rows and the cause. Functions may be async. Deadlines are the caller's.
    """
    if not sample_ids:
        return ScoredBatch([], [], [], {reward.name: [] for reward in functions})
    totals = [0.0] * len(sample_ids)
    status: list[Status] = ["ok"] * len(sample_ids)
    errors: list[str | None] = [None] * len(sample_ids)
    components: dict[str, list[float | None]] = {}
    for reward in functions:
        # Fresh containers, so that one function cannot change what the next one sees.
        batch: dict[str, Any] = {
            "prompts": list(prompts),
            "completions": list(completions),
            "answers": list(answers),
            "metadata": [dict(row) for row in metadata],
        }
        results = _call(reward, batch, sample_ids)
        components[reward.name] = [result.value for result in results]
        for row, result in enumerate(results):
            if result.value is not None:
                totals[row] += reward.weight * result.value
            elif status[row] == "ok" or (status[row], result.status) == ("failed_infra", "invalid_data"):
                status[row] = result.status
                errors[row] = f"{reward.name}: {result.error or 'no reason given'}"
    for sample, total in zip(sample_ids, totals, strict=True):
        if not math.isfinite(total):
            raise RewardError(f"the weighted sum of the rewards of sample {sample} is {total}: use smaller weights")
    return ScoredBatch(
        rewards=[_clipped(t, clip) if s == "ok" else None for t, s in zip(totals, status, strict=True)],
        status=status,
        error=errors,
        components=components,
    )


def describe_error(error: BaseException) -> str:
    """Type, message and the line in the foreign code that was called, e.g. `KeyError: 'x' (score.py, line 3)`."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # its text names file and line already
    own = Path(__file__).parent
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith("<frozen")
        and Path(f.filename).parent not in (own, Path(importlib.__file__).parent)
    ]
    if not frames:
        return f"{type(error).__name__}: {error}"
    # The deepest line of the file that was entered first: the user's line, not one inside a library it calls.
    frame = [f for f in frames if f.filename == frames[0].filename][-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


def _call(reward: LoadedReward, batch: dict[str, Any], sample_ids: Sequence[str]) -> list[RewardResult]:
    rows = f"{len(sample_ids)} rows, samples {sample_ids[0]} to {sample_ids[-1]}"
    try:
        answer = reward.function(**batch)
        if inspect.isawaitable(answer):
            answer = _await(answer)
    except Exception as error:  # boundary: foreign code; the cause is chained and named
        raise RewardError(f"reward function {reward.name!r} raised {describe_error(error)} on {rows}") from error
    if isinstance(answer, str | bytes | dict) or not hasattr(answer, "__len__") or not hasattr(answer, "__iter__"):
        raise RewardError(f"reward function {reward.name!r} returned a {type(answer).__name__}, not a list, on {rows}")
    if len(answer) != len(sample_ids):
        raise RewardError(f"reward function {reward.name!r} returned {len(answer)} values for {rows}")
    return [_result(reward.name, value, sample) for value, sample in zip(answer, sample_ids, strict=True)]


def _await(answer: Awaitable[Any]) -> Any:
    async def outer() -> Any:
        return await answer

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(outer())
    # The caller's thread already runs a loop, which must not be entered twice.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, outer()).result()


def _result(name: str, value: Any, sample: str) -> RewardResult:
    if isinstance(value, RewardResult):
        if value.value is None:
            return value
        value = value.value
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise RewardError(
            f"reward function {name!r} returned {value!r} ({type(value).__name__}) for sample {sample}: return a "
            "number, or a RewardResult with a status where there is no score"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(
            f"reward function {name!r} returned {value!r} for sample {sample}, which is not one number: {error}"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"reward function {name!r} returned {number} for sample {sample}: a reward must be finite")
    return RewardResult(value=number)


def _clipped(total: float, clip: float | None) -> float:
    return total if clip is None else max(-clip, min(clip, total))
