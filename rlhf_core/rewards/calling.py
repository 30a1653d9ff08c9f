"""Calling one reward function and checking what it hands back. Runs in the reward host, beside the user's code."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from rlhf_core.errors import RewardError
from rlhf_core.rewards.contract import Answer, RewardResult

#: Frames of these folders say nothing to the writer of a reward function.
_FOREIGN = {Path(__file__).parent, Path(importlib.__file__).parent, Path(asyncio.__file__).parent}


def call_reward(
    name: str,
    function: Callable[..., Any],
    batch: dict[str, Any],
    sample_ids: Sequence[str],
    loop: asyncio.AbstractEventLoop,
) -> list[Answer]:
    """Call the function with N rows; what it awaits runs on ``loop``. One answer a row, in order.

    Whatever it raises (also ``SystemExit``), a wrong length, or a value that is no finite number is a RewardError with the
    function, the rows and the cause.
    """
    rows = describe_rows(sample_ids)
    try:
        answer = function(**batch)
        if inspect.isawaitable(answer):
            answer = loop.run_until_complete(_awaited(answer))
    except BaseException as error:  # boundary: foreign code; sys.exit in it must not end the host
        raise RewardError(f"reward function {name!r} raised {describe_error(error)} on {rows}") from error
    if isinstance(answer, str | bytes | dict) or not hasattr(answer, "__len__") or not hasattr(answer, "__iter__"):
        raise RewardError(f"reward function {name!r} returned a {type(answer).__name__}, not a list, on {rows}")
    if len(answer) != len(sample_ids):
        raise RewardError(f"reward function {name!r} returned {len(answer)} values for {rows}")
    return [_checked(name, value, sample) for value, sample in zip(answer, sample_ids, strict=True)]


def describe_rows(sample_ids: Sequence[str]) -> str:
    """The rows of a call, for error messages."""
    return f"{len(sample_ids)} rows, samples {sample_ids[0]} to {sample_ids[-1]}"


def describe_error(error: BaseException) -> str:
    """Type, message and the line in the foreign code that was called, e.g. `KeyError: 'x' (score.py, line 3)`."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # its text names file and line already
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith("<frozen") and Path(f.filename).parent not in _FOREIGN
    ]
    if not frames:
        return f"{type(error).__name__}: {error}"
    # The deepest line of the file that was entered first: the user's line, not one inside a library it calls.
    frame = [f for f in frames if f.filename == frames[0].filename][-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _checked(name: str, value: Any, sample: str) -> Answer:
    if value is None:
        return None
    if isinstance(value, RewardResult):
        if value.value is None:
            return RewardResult(status=value.status, error=None if value.error is None else str(value.error))
        value = value.value
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise RewardError(
            f"reward function {name!r} returned {value!r} ({type(value).__name__}) for sample {sample}: return a "
            "number, None where it has nothing to say, or a RewardResult with a status where there is no score"
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
