"""Counting what was written without gaps."""

from __future__ import annotations

from collections.abc import Callable


def count_without_gaps(exists: Callable[[int], bool], known: int = 0) -> int:
    """How many of 0, 1, 2, ... exist, given that the first ``known`` do and there are no gaps: doubling, then halving.

    A logarithmic number of look-ups, which is what makes a look at a run of 10,000 iterations cheap.
    """
    step = 1
    while exists(known + step - 1):
        known += step
        step *= 2
    absent = known + step
    while absent - known > 1:
        middle = (known + absent) // 2
        if exists(middle - 1):
            known = middle
        else:
            absent = middle
    return known
