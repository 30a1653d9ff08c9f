"""Which prompts an iteration trains on: a pure function of seed and iteration, so that resume needs no cursor."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhf_core.errors import PromptError


def prompt_rows(num_prompts: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """Row numbers (0 .. num_prompts - 1) of the ``per_iteration`` prompts of ``iteration`` (from 0), in order.

    The rows of all iterations form one stream of epochs; each epoch is a permutation of all prompts, so every prompt
    is used exactly once an epoch, and iterations run across epoch borders. Where an iteration holds the end of one
    epoch and the start of the next, the next epoch is rearranged so that no prompt comes twice in that iteration. Only
    if ``per_iteration > num_prompts`` repetitions cannot be avoided, and the epochs simply follow each other.
    PromptError for no prompts.
    """
    _check(num_prompts, per_iteration, iteration)
    rows: list[int] = []
    position, end = iteration * per_iteration, (iteration + 1) * per_iteration
    while position < end:
        epoch, offset = divmod(position, num_prompts)
        taken = _epoch(num_prompts, per_iteration, epoch, seed)[offset : offset + end - position]
        rows.extend(int(row) for row in taken)
        position += len(taken)
    return rows


def _check(num_prompts: int, per_iteration: int, iteration: int) -> None:
    if num_prompts < 1:
        raise PromptError("there are no prompts to train on: add prompts, or lower prompts.heldout")
    if per_iteration < 1 or iteration < 0:
        raise ValueError(f"per_iteration = {per_iteration} must be at least 1 and iteration = {iteration} at least 0")


def _permutation(num_prompts: int, epoch: int, seed: int) -> Any:
    """int64[num_prompts]. Sorted raw draws: NumPy keeps raw streams stable across releases (NEP 19), shuffles not."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(num_prompts), kind="stable")


def _epoch(num_prompts: int, per_iteration: int, epoch: int, seed: int) -> Any:
    """The order of one epoch, int64[num_prompts], rearranged where its first iteration began in the epoch before."""
    if per_iteration > num_prompts:
        return _permutation(num_prompts, epoch, seed)
    # With two iterations' worth of prompts, swaps can stay clear of an epoch's end: the end is then that of the plain
    # permutation and one look back is enough. Otherwise the chain starts where an epoch and an iteration begin
    # together, at most ``per_iteration`` epochs back.
    clear = per_iteration - 1 if num_prompts >= 2 * per_iteration else 0
    first = epoch
    while (first * num_prompts) % per_iteration and (not clear or first == epoch):
        first -= 1
    order = _permutation(num_prompts, first, seed)
    for number in range(first + 1, epoch + 1):
        shared = (number * num_prompts) % per_iteration  # rows of the border iteration that the earlier epoch gave
        order = _without(_permutation(num_prompts, number, seed), order[num_prompts - shared :], per_iteration, clear)
    return order


def _without(order: Any, earlier: Any, per_iteration: int, clear: int) -> Any:
    """Swap prompts of ``earlier`` out of the rest of their iteration, never touching the last ``clear`` places."""
    head = per_iteration - len(earlier)
    used = np.isin(order, earlier)
    out = np.flatnonzero(used[:head])
    free = head + np.flatnonzero(~used[head : len(order) - clear])[: len(out)]
    order[out], order[free] = order[free], order[out]
    return order
