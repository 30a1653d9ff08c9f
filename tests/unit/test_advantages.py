"""Group relative advantages: closed forms, conventions and edge cases."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.advantages import group_relative, per_token
from rlhf_core.errors import NumericsError

DTYPES = (torch.float64, torch.float32)


def plain_grpo(rewards, groups, valid, normalize_std, epsilon):
    """A second opinion: the published formula, group by group, with the statistics module."""
    result = [0.0] * len(rewards)
    for g in set(groups):
        rows = [i for i, h in enumerate(groups) if h == g and valid[i]]
        numbers = [rewards[i] for i in rows]
        if len(rows) < 2 or len(set(numbers)) == 1:
            continue
        mean = statistics.fmean(numbers)
        scale = statistics.stdev(numbers) + epsilon if normalize_std else 1.0
        for i in rows:
            result[i] = (rewards[i] - mean) / scale
    return result


def ones(n):
    return torch.ones(n, dtype=torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_hand(dtype):
    # group 7: rewards 0 and 1, mean 1/2, ddof=1 std sqrt(1/2); group 3: 1, 2, 3, mean 2, std 1
    rewards_N = torch.tensor([0.0, 1.0, 1.0, 2.0, 3.0], dtype=dtype)
    groups_N = torch.tensor([7, 3, 7, 3, 3])
    result = group_relative(rewards_N, groups_N, ones(5), epsilon=1e-6)
    pair = 0.5 / (math.sqrt(0.5) + 1e-6)
    third = 1 / (1 + 1e-6)
    assert result.advantages_N.dtype == dtype
    # by position: group 7 holds rows 0 and 2 (rewards 0, 1), group 3 rows 1, 3, 4 (rewards 1, 2, 3)
    assert result.advantages_N.tolist() == pytest.approx([-pair, -third, pair, 0.0, third], rel=1e-6)
    assert (result.degenerate_groups, result.equal_groups) == (0, 0)


def test_without_std_is_the_centred_reward():
    result = group_relative(torch.tensor([0.0, 1.0, 5.0]), torch.zeros(3, dtype=torch.int64), ones(3), False)
    assert result.advantages_N.tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("right", [1, 3, 7])
def test_binary_rewards_closed_form(right):
    # k of n right: mean p = k/n, var = n/(n-1) p (1-p)
    n, p = 8, right / 8
    rewards_N = torch.zeros(n, dtype=torch.float64)
    rewards_N[:right] = 1
    advantages = group_relative(rewards_N, torch.zeros(n, dtype=torch.int64), ones(n), epsilon=1e-12).advantages_N
    std = math.sqrt(n / (n - 1) * p * (1 - p))
    assert advantages[0].item() == pytest.approx((1 - p) / std, rel=1e-9)
    assert advantages[-1].item() == pytest.approx(-p / std, rel=1e-9)


def test_centred_reward_is_scaled_rloo():
    # RLOO compares with the mean of the others: r - mean_others = n/(n-1) (r - mean)
    rewards = [0.3, 1.7, -2.0, 0.9]
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    centred = group_relative(rewards_N, torch.zeros(4, dtype=torch.int64), ones(4), False).advantages_N
    rloo = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert (centred * 4 / 3).tolist() == pytest.approx(rloo, abs=1e-15)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_against_plain_loop(seed, normalize_std):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 80))
    groups = rng.choice([-5, 0, 3, 2**40, 17, 99], size=n)
    rewards = np.round(rng.normal(size=n), int(rng.integers(0, 3)))  # coarse rounding makes equal groups
    valid = rng.random(n) < 0.7
    result = group_relative(
        torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid), normalize_std=normalize_std, epsilon=1e-6
    )
    expected = plain_grpo(rewards.tolist(), groups.tolist(), valid.tolist(), normalize_std, 1e-6)
    assert result.advantages_N.tolist() == pytest.approx(expected, abs=1e-9)
    members = [rewards[(groups == g) & valid] for g in set(groups.tolist())]
    assert result.degenerate_groups == sum(len(m) < 2 for m in members)
    assert result.equal_groups == sum(len(m) > 1 and len(set(m)) == 1 for m in members)


def test_row_order_does_not_matter():
    rng = np.random.default_rng(3)
    rewards_N, groups_N = torch.tensor(rng.normal(size=32)), torch.tensor(rng.integers(0, 4, size=32))
    order = torch.tensor(rng.permutation(32))
    straight = group_relative(rewards_N, groups_N, ones(32)).advantages_N
    shuffled = group_relative(rewards_N[order], groups_N[order], ones(32)).advantages_N
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e6 + 0.1])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_are_exactly_zero(dtype, reward, normalize_std):
    # sum(0.1 * 7) / 7 != 0.1 in floating point; dividing that residue by a tiny std would invent a signal
    rewards_N = torch.full((7,), reward, dtype=dtype)
    result = group_relative(rewards_N, torch.zeros(7, dtype=torch.int64), ones(7), normalize_std, epsilon=1e-30)
    assert result.advantages_N.tolist() == [0.0] * 7
    assert (result.equal_groups, result.degenerate_groups) == (1, 0)


def test_rewards_equal_up_to_rounding_stay_negligible():
    rewards_N = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)  # one last bit apart
    advantages_N = group_relative(rewards_N, torch.zeros(4, dtype=torch.int64), ones(4)).advantages_N
    assert advantages_N.abs().max().item() < 1e-9


def test_singleton_and_invalid_groups_are_zero_and_counted():
    nan = float("nan")
    rewards_N = torch.tensor([5.0, 1.0, nan, nan, nan, 2.0, 4.0, nan])
    groups_N = torch.tensor([0, 1, 1, 2, 2, 3, 3, 3])
    valid_N = torch.tensor([True, True, False, False, False, True, True, False])
    result = group_relative(rewards_N, groups_N, valid_N, normalize_std=False)
    assert result.advantages_N.tolist() == [0, 0, 0, 0, 0, -1, 1, 0]
    assert (result.degenerate_groups, result.equal_groups) == (3, 0)


def test_all_invalid_and_empty():
    result = group_relative(torch.full((4,), float("nan")), torch.tensor([0, 0, 1, 1]), ~ones(4))
    assert result.advantages_N.tolist() == [0.0] * 4
    assert (result.degenerate_groups, result.equal_groups) == (2, 0)
    empty = group_relative(torch.zeros(0), torch.zeros(0, dtype=torch.int64), ones(0))
    assert (empty.advantages_N.shape, empty.degenerate_groups) == ((0,), 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_valid_reward_is_an_error(bad):
    with pytest.raises(NumericsError, match="row 1 of group 9"):
        group_relative(torch.tensor([1.0, bad]), torch.tensor([9, 9]), ones(2))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="share one shape"):
        group_relative(torch.zeros(3), torch.zeros(2, dtype=torch.int64), ones(3))


def test_per_token():
    flat = per_token(torch.tensor([1.5, -2.0, 7.0]), torch.tensor([2, 0, 3]))
    assert flat.tolist() == [1.5, 1.5, 7.0, 7.0, 7.0]
