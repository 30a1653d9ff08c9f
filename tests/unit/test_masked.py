"""Aggregation and group statistics: hand-worked numbers, and invariance to how a step is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.masked import (
    Denominators,
    aggregate,
    at_least_float32,
    count,
    group_statistics,
    keep,
    length_mask,
    masked_max,
    masked_sum,
    pad_rows,
)

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
DTYPES = (torch.float64, torch.float32)


def step(rows=13, width=9, seed=0):
    """Values, a mask with holes and two fully masked rows, and the denominators of the step."""
    generator = torch.Generator().manual_seed(seed)
    values_BT = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask_BT = torch.rand(rows, width, generator=generator) < 0.6
    mask_BT[3] = False
    mask_BT[rows - 1] = False
    return values_BT, mask_BT, count(mask_BT.sum(-1).numpy(), norm_length=11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # rows (1, 2), (6), () -> token sums 3, 6, 0; three tokens, two sequences, longest response 4
        ("token-mean", 9 / 3),
        ("seq-mean-token-mean", (1.5 + 6) / 2),
        ("seq-mean-token-sum", (3 + 6) / 2),
        ("seq-mean-token-sum-norm", (3 + 6) / (2 * 4)),
    ],
)
def test_aggregate_by_hand(mode, expected, dtype):
    values_BT = torch.tensor([[1.0, 2.0, 99.0], [99.0, 6.0, 99.0], [99.0, 99.0, 99.0]], dtype=dtype)
    mask_BT = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])
    result = aggregate(values_BT, mask_BT, mode, Denominators(tokens=3, sequences=2, norm_length=4))
    assert result.dtype == dtype
    assert result.item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_sum_over_any_split_is_the_whole(mode):
    values_BT, mask_BT, denominators = step()
    whole = aggregate(values_BT, mask_BT, mode, denominators)
    rng = np.random.default_rng(1)
    for parts in (1, 2, 3, 5, 13, 20):  # 20 parts: some micro-batches are empty, as on a short rank
        owner = rng.integers(0, parts, size=len(values_BT))
        pieces = [aggregate(values_BT[owner == p], mask_BT[owner == p], mode, denominators) for p in range(parts)]
        assert abs(sum(pieces) - whole).item() <= 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_holes_do_not_matter(mode):
    values_BT, mask_BT, denominators = step()
    whole = aggregate(values_BT, mask_BT, mode, denominators)
    padded_values_BT = torch.nn.functional.pad(values_BT, (4, 7), value=float("nan"))
    padded_mask_BT = torch.nn.functional.pad(mask_BT, (4, 7), value=False)
    assert abs(aggregate(padded_values_BT, padded_mask_BT, mode, denominators) - whole).item() <= 1e-12
    lengths_B = mask_BT.sum(-1)
    packed_BT = pad_rows(values_BT[mask_BT], lengths_B, width=10)  # packed tokens, put back without holes
    assert abs(aggregate(packed_BT, length_mask(lengths_B, 10), mode, denominators) - whole).item() <= 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_gradient_over_splits_is_the_whole(mode):
    values_BT, mask_BT, denominators = step()
    whole_BT = values_BT.clone().requires_grad_()
    aggregate(whole_BT, mask_BT, mode, denominators).backward()
    parts_BT = values_BT.clone().requires_grad_()
    for rows in ([0, 5], [1, 2, 3], [4, *range(6, 13)]):
        aggregate(parts_BT[rows], mask_BT[rows], mode, denominators).backward()
    torch.testing.assert_close(parts_BT.grad, whole_BT.grad, rtol=0, atol=1e-15)
    assert not parts_BT.grad[~mask_BT].any()


def test_local_denominators_would_not_be_invariant():
    values_BT, mask_BT, _ = step()
    cut = [slice(0, 3), slice(3, 13)]  # unequal numbers of tokens
    local = [
        aggregate(values_BT[h], mask_BT[h], "token-mean", count(mask_BT[h].sum(-1).numpy(), norm_length=11))
        for h in cut
    ]
    whole = aggregate(values_BT, mask_BT, "token-mean", count(mask_BT.sum(-1).numpy(), norm_length=11))
    assert abs(sum(local) / 2 - whole).item() > 1e-3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (2, 4)])
def test_empty_microbatch_is_zero_and_keeps_the_graph(mode, shape):
    for denominators in (Denominators(7, 2, 4), Denominators(0, 0, 4)):
        values_BT = torch.full(shape, float("nan"), requires_grad=True)
        loss = aggregate(values_BT, torch.zeros(shape, dtype=torch.bool), mode, denominators)
        loss.backward()
        assert loss.item() == 0
        assert not values_BT.grad.any()


def test_aggregate_refuses_what_does_not_fit():
    values_BT, mask_BT, denominators = step()
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        aggregate(values_BT, mask_BT, "mean", denominators)
    with pytest.raises(ValueError, match="shape"):
        aggregate(values_BT, mask_BT[:, :1], "token-mean", denominators)
    with pytest.raises(ValueError, match="count over the same rows"):
        aggregate(values_BT, mask_BT, "token-mean", Denominators(0, 0, 4))


def test_count():
    assert count([3, 0, 2], norm_length=8) == Denominators(tokens=5, sequences=2, norm_length=8)
    assert count([], norm_length=8) == Denominators(0, 0, 8)
    with pytest.raises(ValueError, match="lengths are counts"):
        count([3, -1], norm_length=8)
    with pytest.raises(ValueError, match="norm_length = 0"):
        count([3], norm_length=0)
    with pytest.raises(ValueError, match="at least one token"):
        Denominators(tokens=1, sequences=2, norm_length=1)


def test_keep_stops_nan_in_value_and_gradient():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    kept = keep(values, torch.tensor([True, False, False]))
    torch.exp(kept).sum().backward()
    assert kept.tolist() == [1.0, 0.0, 0.0]
    assert values.grad.tolist() == pytest.approx([2.7182817, 0.0, 0.0])


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_at_least_float32(dtype, wide):
    assert at_least_float32(torch.zeros(1, dtype=dtype)).dtype == wide


def test_masked_sum_and_max():
    values = torch.tensor([[1.0, 5.0], [float("nan"), -2.0]])
    mask = torch.tensor([[True, False], [False, True]])
    assert masked_sum(values, mask).item() == -1.0
    assert masked_max(values, mask).item() == 1.0
    assert masked_max(values, torch.zeros_like(mask)).item() == -torch.inf
    assert masked_max(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).item() == -torch.inf
    assert masked_sum(values, mask).dtype == masked_max(values, mask).dtype == torch.float64


def test_pad_rows_round_trip_with_gradient():
    flat_N = torch.arange(1.0, 6.0, dtype=torch.float64, requires_grad=True)
    rows_BT = pad_rows(flat_N, torch.tensor([2, 0, 3]), width=4)
    assert rows_BT.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 0]]
    (rows_BT * torch.arange(12.0).view(3, 4)).sum().backward()
    assert flat_N.grad.tolist() == [0, 1, 8, 9, 10]
    for lengths in ([2, 0, 2], [5, 0, 0], [2, 0, 4]):
        with pytest.raises(ValueError, match="add up"):
            pad_rows(flat_N, torch.tensor(lengths), width=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_statistics_against_numpy(dtype):
    rng = np.random.default_rng(2)
    groups = rng.integers(0, 5, size=60)
    valid = rng.random(60) < 0.8
    values = rng.normal(1e4, 3.0, size=60)  # a large offset: one-pass formulas lose digits here
    values_N = torch.tensor(values, dtype=dtype)
    stats = group_statistics(values_N, torch.tensor(groups), torch.tensor(valid), 6)
    for g in range(5):
        rows = values_N.double().numpy()[(groups == g) & valid]
        assert stats.counts_G[g].item() == len(rows)
        assert stats.mean_G[g].item() == pytest.approx(rows.mean(), rel=1e-14)
        assert stats.std_G[g].item() == pytest.approx(rows.std(ddof=1), rel=1e-12)
        assert (stats.minimum_G[g].item(), stats.maximum_G[g].item()) == (rows.min(), rows.max())
    assert (stats.counts_G[5].item(), stats.mean_G[5].item(), stats.std_G[5].item()) == (0, 0.0, 0.0)
