"""Generated arithmetic prompts with verifiable answers: a task that a small model learns in minutes."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np

from rlhf_core.config.data import ArithmeticConfig
from rlhf_core.errors import PromptError

#: At most so many prompts are generated; larger ranges are sampled.
MAX_PROMPTS = 4096

_ASK = "Answer with just the number."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_WORDS: dict[str, tuple[Callable[[int, int], str], ...]] = {
    "+": (
        lambda a, b: f"Mia has {_count(a, 'apple')} and buys {b} more. How many apples does she have now?",
        lambda a, b: f"A jar holds {_count(a, 'marble')}. Ben adds {b} more. How many marbles are in the jar?",
        lambda a, b: f"Leo read {_count(a, 'page')} on Monday and {b} on Tuesday. How many pages did he read in total?",
        lambda a, b: f"There are {_count(a, 'red car')} and {_count(b, 'blue car')} outside. How many cars are there?",
    ),
    "-": (
        lambda a, b: f"Mia has {_count(a, 'apple')} and eats {b} of them. How many apples are left?",
        lambda a, b: f"A jar holds {_count(a, 'marble')}. Ben takes {b} out. How many marbles are left in the jar?",
        lambda a, b: f"A book has {_count(a, 'page')}. Leo has read {b} of them. How many pages remain?",
        lambda a, b: f"A bus carries {_count(a, 'passenger')} and {b} get off. How many passengers are still on it?",
    ),
    "*": (
        lambda a, b: (
            f"There are {_count(a, 'bag')} with {_count(b, 'apple')} each. How many apples are there in total?"
        ),
        lambda a, b: f"Ben fills {_count(a, 'jar')} with {_count(b, 'marble')} each. How many marbles does he need?",
        lambda a, b: f"Leo reads {_count(b, 'page')} a day for {_count(a, 'day')}. How many pages does he read?",
        lambda a, b: f"A hall has {_count(a, 'row')} of {_count(b, 'chair')} each. How many chairs does the hall have?",
    ),
}


def arithmetic_rows(config: ArithmeticConfig, seed: int) -> list[dict[str, Any]]:
    """Rows with ``prompt``, ``answer`` (decimal string), ``operation``, ``left``, ``right`` and ``style``, shuffled.

    All operand pairs of low..high for every operation and wording; for "-" only the pairs with left >= right, so that
    no answer is negative. Above MAX_PROMPTS that many distinct ones are drawn, without enumerating the others.
    PromptError if low is above high.
    """
    if config.low > config.high:
        raise PromptError(f"prompts.arithmetic.low = {config.low} is above prompts.arithmetic.high = {config.high}")
    span = config.high - config.low + 1
    blocks: list[tuple[str, str, Callable[[int, int], str], int]] = []
    operation: str
    for operation in dict.fromkeys(config.operations):
        pairs = span * (span + 1) // 2 if operation == "-" else span * span
        if config.style in ("plain", "mixed"):
            blocks.append((operation, "plain", _plain(operation), pairs))
        if config.style in ("word", "mixed"):
            blocks.extend((operation, "word", template, pairs) for template in _WORDS[operation])
    ends = np.cumsum([pairs for *_, pairs in blocks])
    chosen = _distinct_indices(int(ends[-1]), min(MAX_PROMPTS, int(ends[-1])), seed)
    rows = []
    for index in chosen:
        block = int(np.searchsorted(ends, index, side="right"))
        operation, style, template, pairs = blocks[block]
        left, right = _pair(index - (int(ends[block]) - pairs), operation, config.low, span)
        answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
        rows.append(
            {
                "prompt": f"{template(left, right)} {_ASK}",
                "answer": str(answer),
                "operation": operation,
                "left": left,
                "right": right,
                "style": style,
            }
        )
    return rows


def _plain(operation: str) -> Callable[[int, int], str]:
    return lambda a, b: f"What is {a} {operation} {b}?"


def _pair(index: int, operation: str, low: int, span: int) -> tuple[int, int]:
    """The pair number ``index``: row-major for all pairs, triangular (left >= right) for "-"."""
    if operation != "-":
        return low + index // span, low + index % span
    left = (isqrt(8 * index + 1) - 1) // 2
    return low + left, low + index - left * (left + 1) // 2


def _distinct_indices(total: int, wanted: int, seed: int) -> list[int]:
    """``wanted`` distinct numbers below ``total`` in random order.

    Uses raw draws of a bit generator, whose stream NumPy keeps stable across releases (NEP 19), unlike the methods of
    Generator: a resumed run must see the same prompts after an upgrade.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, 0x61726974]))
    if wanted == total:
        return [int(i) for i in np.argsort(bits.random_raw(total), kind="stable")]
    found: dict[int, None] = {}
    while len(found) < wanted:
        found.update(dict.fromkeys(int(i) for i in bits.random_raw(wanted) % np.uint64(total)))
    return list(found)[:wanted]
