"""Importance weights and the raw mismatch between trainer and engine."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from rlhf_core.algorithms.correction import importance_weights, mismatch
from rlhf_core.metrics import merge_metrics, values

DTYPES = (torch.float64, torch.float32)


def true(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_by_hand(dtype):
    d = torch.tensor([[0.0, math.log(1.5), math.log(3.0), -math.log(4.0)]], dtype=dtype)
    weights_BT = importance_weights(d - 1, torch.full((1, 4), -1.0, dtype=dtype), true(1, 4), cap=2.0)
    assert weights_BT.dtype == dtype
    assert weights_BT[0].tolist() == pytest.approx([1.0, 1.5, 2.0, 0.25], rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_weights_are_capped_and_constant(dtype):
    old_BT = torch.tensor([[40.0, -40.0, 1000.0]], dtype=dtype, requires_grad=True)
    weights_BT = importance_weights(old_BT, torch.zeros(1, 3, dtype=dtype), true(1, 3), cap=2.0)
    assert weights_BT[0].tolist() == pytest.approx([2.0, math.exp(-40), 2.0], rel=1e-6)
    assert not weights_BT.requires_grad


def test_masked_weights_are_zero():
    nan = float("nan")
    weights_BT = importance_weights(
        torch.tensor([[nan, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.tensor([[False, True]]), cap=2.0
    )
    assert weights_BT.tolist() == [[0.0, 1.0]]
    with pytest.raises(ValueError, match="cap = 0"):
        importance_weights(torch.zeros(1), torch.zeros(1), true(1), cap=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mismatch_by_hand(dtype):
    d = [0.5, -0.25, 1.0]
    old_BT = torch.tensor([[*d, 99.0]], dtype=dtype)
    stats = mismatch(old_BT, torch.zeros(1, 4, dtype=dtype), torch.tensor([[True, True, True, False]]), cap=1.6)
    assert stats.tokens.item() == 3
    assert stats.log_ratio_sum.item() == pytest.approx(1.25)
    assert stats.abs_sum.item() == pytest.approx(1.75)
    assert stats.abs_max.item() == 1.0
    assert stats.k3_sum.item() == pytest.approx(sum(math.exp(x) - 1 - x for x in d), rel=1e-12)
    assert stats.chi_square_sum.item() == pytest.approx(sum(math.exp(2 * x) - 1 for x in d), rel=1e-12)
    assert stats.truncated.item() == 2  # exp(0.5) = 1.65 and exp(1) = 2.72 are above 1.6
    assert mismatch(old_BT, torch.zeros(1, 4, dtype=dtype), true(1, 4)).truncated.item() == 0


def test_expectations_are_the_divergences():
    # exact expectation over the engine's distribution of a small vocabulary
    generator = torch.Generator().manual_seed(1)
    trainer_V, engine_V = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    p, q = engine_V.exp(), trainer_V.exp()
    total = {"log_ratio_sum": 0.0, "k3_sum": 0.0, "chi_square_sum": 0.0}
    for token in range(6):
        stats = mismatch(trainer_V[token].view(1, 1), engine_V[token].view(1, 1), true(1, 1))
        for name in total:
            total[name] += (p[token] * getattr(stats, name)).item()
    kl = (p * (engine_V - trainer_V)).sum().item()
    assert -total["log_ratio_sum"] == pytest.approx(kl, rel=1e-12)
    assert total["k3_sum"] == pytest.approx(kl, rel=1e-12)
    assert total["chi_square_sum"] == pytest.approx(((q - p) ** 2 / p).sum().item(), rel=1e-12)


def test_stats_are_raw_and_finite_at_extremes():
    stats = mismatch(torch.tensor([[40.0, -40.0, 500.0]]), torch.zeros(1, 3), true(1, 3), cap=2.0)
    assert all(torch.isfinite(getattr(stats, f.name)) for f in fields(stats))
    assert (stats.abs_max.item(), stats.abs_sum.item(), stats.truncated.item()) == (500.0, 580.0, 2)


def test_truncated_counts_what_the_weights_cut():
    generator = torch.Generator().manual_seed(2)
    old_BT, engine_BT = torch.randn(2, 8, 9, generator=generator)
    mask_BT = torch.rand(8, 9, generator=generator) < 0.5
    weights_BT = importance_weights(old_BT, engine_BT, mask_BT, cap=1.3)
    cut = (weights_BT == torch.tensor(1.3)) & mask_BT
    assert mismatch(old_BT, engine_BT, mask_BT, cap=1.3).truncated.item() == cut.sum().item()


def test_metrics_merge_to_the_whole_and_ignore_masked_nan():
    generator = torch.Generator().manual_seed(3)
    old_BT, engine_BT = torch.randn(2, 10, 5, generator=generator)
    mask_BT = torch.rand(10, 5, generator=generator) < 0.6
    mask_BT[9] = False
    old_BT[~mask_BT] = float("nan")
    whole = mismatch(old_BT, engine_BT, mask_BT, cap=2.0).as_metrics()
    parts = [
        mismatch(old_BT[s], engine_BT[s], mask_BT[s], cap=2.0).as_metrics() for s in ([0, 7], [9], range(1, 7), [8])
    ]
    merged = values(merge_metrics(parts))
    assert merged == pytest.approx(values(whole), rel=1e-12)
    assert all(math.isfinite(x) for x in merged.values())
    assert values(parts[1]) == {"mismatch/tokens": 0.0}
