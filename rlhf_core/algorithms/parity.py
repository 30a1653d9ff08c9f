"""Whether two computations of the same logprobs agree: rows that show faults, and the bound that tells a fault from rounding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Response tokens of the longest sample, where the context has room. Short ones suffice: a fault of a layout or of the head is in
#: every token.
_TOKENS = 24

#: Longest prompt that is made to fill a window: the plain model's attention keeps a table of queries by keys.
_LONGEST = 4608

#: Largest mean difference in float32.
FLOAT32 = 1e-4

#: Times the plain model's own rounding error that trainer and engine may be away from it. They round as often as the plain
#: model does, elsewhere: correct ones measure 0.7 to 1.3 (docs/numerics.md).
_FACTOR = 2.0

#: The bound for rounded types is never below this: tiny models have next to no rounding error.
_FLOOR = 2e-3


@dataclass(frozen=True)
class ParityRows:
    """N rows, whole groups behind one another."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and response of each row."""
        return [[*p, *r] for p, r in zip(self.prompts, self.responses, strict=True)]


@dataclass(frozen=True)
class PlainLogprobs:
    """What the plain model says: logprobs at temperature 1 of the response tokens of each row, float32."""

    own: list[np.ndarray]
    """The model in the type that is trained in."""
    exact: list[np.ndarray]
    """The same weights, computed in float32."""


@dataclass(frozen=True)
class Gap:
    """How far logprobs are from others, in nats."""

    mean: float
    """Mean absolute difference over all tokens."""
    worst: float
    """The largest mean absolute difference of a row: a fault may be in some rows only."""

    def within(self, bound: Gap) -> bool:
        """Whether both figures are at most those of ``bound``; not where one is NaN."""
        return self.mean <= bound.mean and self.worst <= bound.worst


def parity_rows(prompts: Sequence[Sequence[int]], samples: int, context: int, window: int | None) -> ParityRows:
    """``samples`` responses of different lengths to each prompt, made of the prompts' own tokens.

    With a ``window`` that is shorter than ``context`` (tokens of a whole sequence) one more prompt is made that fills it, so
    that every response token would show if it was lost.
    """
    pool = list(itertools.chain.from_iterable(prompts))
    tokens = max(1, min(_TOKENS, context // 2))
    chosen = [list(p)[: context - tokens] for p in prompts]
    if window is not None and window < min(context - tokens, _LONGEST):
        chosen.append([pool[i % len(pool)] for i in range(window)])
    rows: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    for group, prompt in enumerate(chosen):
        for sample in range(samples):
            length = max(1, tokens - 5 * (sample % 3))
            start = 7 * (group * samples + sample) + 1  # else all samples would say the same
            response = [pool[(start + i) % len(pool)] for i in range(length)]
            rows.append((tuple(prompt), tuple(response), group))
    return ParityRows(tuple(r[0] for r in rows), tuple(r[1] for r in rows), tuple(r[2] for r in rows))


def gap(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Gap:
    """Difference of two lists of rows of logprobs. A row of ``ours`` may lack tokens at its end, or be empty."""
    rows = [np.abs(a - b[: len(a)]) for a, b in zip(ours, theirs, strict=True) if len(a)]
    return Gap(float(np.concatenate(rows).mean()), max(float(row.mean()) for row in rows))


def bound(dtype: str, yardstick: Gap | None, tolerance: float | None) -> Gap:
    """The largest gap of something correct.

    Args:
        dtype: type that trainer and engine compute in.
        yardstick: how far the plain model in that type is from itself in float32, on the same rows.
        tolerance: the user's own bound, in nats; None derives one.
    """
    if tolerance is not None:
        return Gap(tolerance, 3 * tolerance)
    if dtype == "float32" or yardstick is None:
        return Gap(FLOAT32, 3 * FLOAT32)
    return Gap(max(_FLOOR, _FACTOR * yardstick.mean), max(3 * _FLOOR, _FACTOR * yardstick.worst))
