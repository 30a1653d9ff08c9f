"""Plans of micro-batches and minibatches: properties over random steps, and pinned examples."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from rlhf_core.algorithms.batching import minibatches, plan_microbatches


def counted(units, prompts, responses):
    return len(units) * (prompts[units].max() + responses[units].max()) if units else 0


@pytest.mark.parametrize("seed", range(40))
def test_properties(seed):
    rng = np.random.default_rng(seed)
    n, ranks, budget = int(rng.integers(0, 70)), int(rng.integers(1, 9)), int(rng.integers(1, 400))
    prompts, responses = rng.integers(1, 40, size=n), rng.integers(0, 60, size=n)
    arguments = (prompts + responses, ranks, budget)
    plan = plan_microbatches(*arguments, response_lengths=responses)
    assert plan == plan_microbatches(*arguments, response_lengths=responses)
    units = list(chain.from_iterable(chain.from_iterable(plan)))
    assert sorted(units) == list(range(n))  # every unit exactly once
    assert len(plan) == ranks
    assert len({len(microbatches) for microbatches in plan}) == 1
    assert all(len(m) == 1 or counted(m, prompts, responses) <= budget for m in chain.from_iterable(plan))
    assert all(type(unit) is int for unit in units)
    # no step of only empty micro-batches, and empty ones come last
    for depth in zip(*plan, strict=True):
        assert any(depth)
    for microbatches in plan:
        filled = [bool(m) for m in microbatches]
        assert filled == sorted(filled, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_balanced(seed):
    # LPT: the heaviest rank exceeds the lightest by at most the longest unit
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 500, size=64)
    plan = plan_microbatches(lengths, 4, 2000, response_lengths=lengths - 1)
    loads = [int(lengths[list(chain.from_iterable(microbatches))].sum()) for microbatches in plan]
    assert max(loads) - min(loads) <= lengths.max()


def test_by_hand():
    # responses 8, 7, 2, 1 with prompts of 2: rank 0 takes units 0 and 3, rank 1 units 1 and 2
    plan = plan_microbatches([10, 9, 4, 3], 2, 20, response_lengths=[8, 7, 2, 1])
    assert plan == [[[0, 3]], [[1, 2]]]
    # 2 units * 10 tokens exceed 19 on rank 0; rank 1 still fits and ends with an empty micro-batch
    plan = plan_microbatches([10, 9, 4, 3], 2, 19, response_lengths=[8, 7, 2, 1])
    assert plan == [[[0], [3]], [[1, 2], []]]


def test_a_microbatch_counts_its_longest_prompt_and_its_longest_response():
    # 9 + 1 and 1 + 9 tokens: together each counts as 18, though both are 10 long
    lengths, responses = [10, 10], [1, 9]
    assert plan_microbatches(lengths, 1, 35, response_lengths=responses) == [[[1], [0]]]
    assert plan_microbatches(lengths, 1, 36, response_lengths=responses) == [[[1, 0]]]


def test_similar_lengths_share_a_microbatch():
    lengths = np.array([101, 11, 100, 10, 99, 12])
    plan = plan_microbatches(lengths, 1, 303, response_lengths=lengths - 1)
    assert plan == [[[0, 2, 4], [5, 1, 3]]]


def test_a_unit_above_the_budget_is_alone():
    plan = plan_microbatches([50, 5, 5], 1, 10, response_lengths=[40, 3, 3])
    assert plan == [[[0], [1, 2]]]


def test_more_ranks_than_units_and_none_at_all():
    assert plan_microbatches([5], 3, 10, response_lengths=[2]) == [[[0]], [[]], [[]]]
    assert plan_microbatches([], 2, 10, response_lengths=[]) == [[], []]


def test_plan_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="share one shape"):
        plan_microbatches([5, 6], 1, 10, response_lengths=[2])
    with pytest.raises(ValueError, match="unit 1 has 6 tokens with a response of 7"):
        plan_microbatches([5, 6], 1, 10, response_lengths=[2, 7])
    for ranks, budget in ((0, 10), (1, 0)):
        with pytest.raises(ValueError, match="both are at least 1"):
            plan_microbatches([5], ranks, budget, response_lengths=[2])


@pytest.mark.parametrize(("prompts", "updates"), [(1, 1), (16, 1), (16, 4), (12, 12)])
def test_minibatches_partition_the_groups(prompts, updates):
    parts = minibatches(prompts, updates, (0, 3, 1))
    assert [len(part) for part in parts] == [prompts // updates] * updates
    assert sorted(chain.from_iterable(parts)) == list(range(prompts))
    assert parts == minibatches(prompts, updates, (0, 3, 1))


def test_minibatches_depend_on_every_seed_part():
    seeds = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0,), (0, 0), ()]
    orders = {str(minibatches(64, 1, seed)) for seed in seeds}
    assert len(orders) == len(seeds)


def test_minibatches_are_pinned():
    # a run must resume to the same order after any upgrade: change this only with the format version
    assert minibatches(8, 2, (7, 2, 0)) == [[3, 4, 0, 7], [6, 5, 2, 1]]


def test_every_position_is_equally_likely():
    counts = np.zeros((4, 4))
    for seed in range(2000):
        counts[np.arange(4), minibatches(4, 1, (seed,))[0]] += 1
    assert abs(counts / 2000 - 0.25).max() < 0.05


def test_minibatches_refuse_what_cannot_be():
    for prompts, updates in ((10, 3), (0, 1), (4, 0)):
        with pytest.raises(ValueError, match="equal updates"):
            minibatches(prompts, updates, (0,))
    for part in (-1, 2**32):
        with pytest.raises(ValueError, match="seed_parts"):
            minibatches(4, 2, (0, part))
