"""How the rows of an optimizer step become minibatches, ranks and micro-batches. Pure functions of their arguments; numpy only.

A *unit* is what one sequence of a micro-batch holds: a row, or the rows of a group behind one copy of their prompt
(rlhf_core/engines/rows.py). The order of sums follows from the plan, so another plan gives an update other bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

#: One list a rank, holding its micro-batches in order, each a list of unit indices.
Plan = list[list[list[int]]]


def plan_microbatches(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    tokens_per_microbatch: int,
    *,
    response_lengths: Sequence[int] | np.ndarray,
) -> Plan:
    """Assign the units of one optimizer step to ranks and micro-batches.

    Units go to ranks by token cost, longest first to the least loaded rank (LPT greedy). Each rank puts units of similar
    length together, long ones first, so that ranks do their long micro-batches at the same time. A micro-batch counts as
    units * (longest prompt + longest response) tokens, at most ``tokens_per_microbatch``; a single unit above that is a
    micro-batch of its own. Units are padded at the right to the longest one, so it never takes more tokens than it counts.

    Every rank gets the same number of micro-batches, because ZeRO-3 ranks must run the same collectives: short ranks
    end with empty ones. Without any unit no rank has a micro-batch.

    Args:
        lengths: [N] prompt + response tokens of each unit.
        ranks: data-parallel ranks.
        tokens_per_microbatch: bound on the padded tokens of one forward pass.
        response_lengths: [N] response tokens of each unit.

    Raises ValueError for shapes that differ or impossible numbers.
    """
    lengths_N, responses_N = _checked(lengths, response_lengths)
    if ranks < 1 or tokens_per_microbatch < 1:
        raise ValueError(f"ranks = {ranks}, tokens_per_microbatch = {tokens_per_microbatch}: both are at least 1")
    prompts_N = lengths_N - responses_N
    plan = [_microbatches(units, prompts_N, responses_N, tokens_per_microbatch) for units in _balance(lengths_N, ranks)]
    depth = max(len(microbatches) for microbatches in plan)
    return [microbatches + [[] for _ in range(depth - len(microbatches))] for microbatches in plan]


def minibatches(prompts: int, updates: int, seed_parts: tuple[int, ...]) -> list[list[int]]:
    """A seeded order of the prompt groups 0 .. prompts - 1, cut into ``updates`` equal parts.

    The order sorts raw 64-bit words of PCG64, because numpy promises that stream for ever and the streams of
    ``Generator.permutation`` only within a version: a run must resume to the same order after an upgrade.

    Args:
        prompts: prompt groups of the iteration.
        updates: optimizer steps; must divide ``prompts``.
        seed_parts: ints in 0 .. 2^32 - 1 that name this order, such as (seed, iteration, epoch).

    Raises ValueError if the groups cannot be cut into equal parts, or a seed part is out of range.
    """
    if updates < 1 or prompts < 1 or prompts % updates:
        raise ValueError(f"{prompts} prompt groups cannot be cut into {updates} equal updates")
    if any(not 0 <= part < 2**32 for part in seed_parts):
        raise ValueError(f"seed_parts = {seed_parts}: every part is an int in 0 .. 2^32 - 1")
    # The length goes in first: SeedSequence pads with zeros, so (1,) and (1, 0) alone would give one order.
    words = np.random.PCG64(np.random.SeedSequence((len(seed_parts), *seed_parts))).random_raw(prompts)
    order = np.argsort(words, kind="stable")
    return [part.tolist() for part in order.reshape(updates, -1)]


def _checked(
    lengths: Sequence[int] | np.ndarray, response_lengths: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    lengths_N = np.asarray(lengths, dtype=np.int64)
    responses_N = np.asarray(response_lengths, dtype=np.int64)
    if not (lengths_N.shape == responses_N.shape and lengths_N.ndim == 1):
        shapes = (lengths_N.shape, responses_N.shape)
        raise ValueError(f"lengths and response_lengths must share one shape [N]: {shapes}")
    wrong = np.flatnonzero((responses_N < 0) | (responses_N > lengths_N))
    if wrong.size:
        unit = int(wrong[0])
        raise ValueError(
            f"unit {unit} has {lengths_N[unit]} tokens with a response of {responses_N[unit]}: "
            "lengths are prompt + response tokens"
        )
    return lengths_N, responses_N


def _balance(lengths_N: np.ndarray, ranks: int) -> list[list[int]]:
    """Units of each rank. Ties go to the rank with fewer units, then to the lower one."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for unit in np.argsort(-lengths_N, kind="stable").tolist():
        tokens, count, rank = heapq.heappop(loads)
        assigned[rank].append(unit)
        heapq.heappush(loads, (tokens + int(lengths_N[unit]), count + 1, rank))
    return assigned


def _microbatches(units: list[int], prompts_N: np.ndarray, responses_N: np.ndarray, budget: int) -> list[list[int]]:
    # Responses vary most within an iteration, so they decide the order; then prompts; then the index.
    ordered = sorted(units, key=lambda unit: (-responses_N[unit], -prompts_N[unit], unit))
    microbatches: list[list[int]] = []
    prompt = response = 0
    for unit in ordered:
        wider = max(prompt, int(prompts_N[unit])), max(response, int(responses_N[unit]))
        if microbatches and (len(microbatches[-1]) + 1) * sum(wider) <= budget:
            microbatches[-1].append(unit)
            prompt, response = wider
        else:
            microbatches.append([unit])
            prompt, response = int(prompts_N[unit]), int(responses_N[unit])
    return microbatches
