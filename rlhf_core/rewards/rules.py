"""Built-in reward functions: pure rules over text. See RewardFunction in rlhf_core.ports for the arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from rlhf_core.errors import RewardError
from rlhf_core.rewards.contract import RewardResult

#: A minus belongs to the number only where it cannot be an operator; commas only between groups of three digits.
#: No exponents: "1e999999999" in a response must not become a number too large to compare.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212])?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?:(?<![\w.)\]])[-+\u2212])?(?<![\w.])\.[0-9]+"
)


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))


def last_number(
    *,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
) -> list[float | RewardResult]:
    """1.0 if the last number in the completion equals the answer as a number, else 0.0 (also without any number).

    Reads "1,234", "-3", "0.50" and "5."; an answer that is not a number is invalid data.
    """
    return [_last_number(c, a) for c, a in zip(completions, answers, strict=True)]


def _last_number(completion: str, answer: str | None) -> float | RewardResult:
    if answer is None:
        return RewardResult(status="invalid_data", error="last_number needs an answer and the prompt has none")
    wanted = _NUMBER.fullmatch(answer.strip().removesuffix("."))
    if wanted is None:
        return RewardResult(status="invalid_data", error=f"the answer {answer[:80]!r} is not a number")
    numbers = _NUMBER.findall(completion)
    return float(bool(numbers) and _decimal(numbers[-1]) == _decimal(wanted.group()))


def exact_match(
    *,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    ignore_case: bool = False,
) -> list[float | RewardResult]:
    """1.0 if the completion is the answer, up to white space around them. No answer is invalid data."""
    fold = _fold(ignore_case)
    return [
        RewardResult(status="invalid_data", error="exact_match needs an answer and the prompt has none")
        if a is None
        else float(fold(c) == fold(a))
        for c, a in zip(completions, answers, strict=True)
    ]


def contains_answer(
    *,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    ignore_case: bool = False,
) -> list[float | RewardResult]:
    """1.0 if the answer stands in the completion as whole words ("5" is not in "15"). No answer is invalid data."""
    fold = _fold(ignore_case)
    return [
        float(re.search(rf"(?<!\w){re.escape(fold(a))}(?!\w)", fold(c)) is not None)
        if a is not None and a.strip()
        else RewardResult(status="invalid_data", error="contains_answer needs an answer and the prompt has none")
        for c, a in zip(completions, answers, strict=True)
    ]


def length(
    *,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    target: int = 200,
    max_penalty: float = 1.0,
) -> list[float | RewardResult]:
    """0.0 up to ``target`` characters, then falling linearly to ``-max_penalty`` at twice the target and beyond."""
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise RewardError(f"builtin:length: target = {target!r} must be a whole number of characters, at least 1")
    if isinstance(max_penalty, bool) or not isinstance(max_penalty, int | float) or not 0 < max_penalty < math.inf:
        raise RewardError(f"builtin:length: max_penalty = {max_penalty!r} must be a positive number")
    return [-max_penalty * min(max(len(c) - target, 0) / target, 1.0) for c in completions]


def _fold(ignore_case: bool) -> Callable[[str], str]:
    return (lambda text: text.strip().casefold()) if ignore_case else str.strip


BUILTIN: dict[str, Callable[..., list[float | RewardResult]]] = {
    function.__name__: function for function in (last_number, exact_match, contains_answer, length)
}
