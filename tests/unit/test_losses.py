"""The clipped surrogate: hand-worked tokens, gradients, invariance, statistics."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.kl import token_kl
from rlhf_core.algorithms.losses import add_kl, policy_loss
from rlhf_core.algorithms.masked import Denominators, count
from rlhf_core.metrics import merge_metrics, values

DTYPES = (torch.float64, torch.float32)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def plain_token_loss(ratio, advantage, low, high, weight):
    """A second opinion: PPO's objective by cases, as its figure 1 draws it."""
    if advantage >= 0:
        return -weight * advantage * min(ratio, 1 + high)
    return -weight * advantage * max(ratio, 1 - low)


def batch(rows=11, width=7, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "logprobs_BT": torch.randn(rows, width, generator=g, dtype=torch.float64) * 0.3 - 1,
        "old_logprobs_BT": torch.randn(rows, width, generator=g, dtype=torch.float64) * 0.3 - 1,
        "advantages_BT": torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width),
        "weights_BT": torch.rand(rows, width, generator=g, dtype=torch.float64) * 2,
    }
    mask_BT = torch.rand(rows, width, generator=g) < 0.7
    mask_BT[2] = False
    return {k: v.to(dtype) for k, v in tensors.items()} | {"mask_BT": mask_BT}


def loss_of(b, denominators, mode="token-mean", low=0.2, high=0.28):
    return policy_loss(
        b["logprobs_BT"],
        b["old_logprobs_BT"],
        b["advantages_BT"],
        b["mask_BT"],
        clip_low=low,
        clip_high=high,
        weights_BT=b["weights_BT"],
        mode=mode,
        denominators=denominators,
    )


def rows_of(b, rows):
    return {k: v[rows] for k, v in b.items()}


def denominators_of(b):
    return count(b["mask_BT"].sum(-1).numpy(), norm_length=b["mask_BT"].shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_hand(dtype):
    ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.0]], dtype=dtype)
    logprobs_BT = (ratio.log() - 2).requires_grad_()
    advantages_BT = torch.tensor([[2.0, 2.0, -1.0, -1.0, 3.0]], dtype=dtype)
    loss, stats = policy_loss(
        logprobs_BT,
        torch.full((1, 5), -2.0, dtype=dtype),
        advantages_BT,
        torch.ones(1, 5, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.3,
        weights_BT=None,
        mode="token-mean",
        denominators=Denominators(5, 1, 5),
    )
    loss.backward()
    # A > 0: capped at 1.3 -> -2.6, free below -> -1.0; A < 0: free above -> 1.5, capped at 0.8 -> 0.8; -3.0
    assert loss.item() == pytest.approx((-2.6 - 1.0 + 1.5 + 0.8 - 3.0) / 5, rel=1e-6)
    # gradient of an unclipped token: -ratio * A / 5; clipped tokens have none
    assert logprobs_BT.grad[0].tolist() == pytest.approx([0.0, -0.2, 0.3, 0.0, -0.6], rel=1e-6, abs=1e-9)
    assert (stats.tokens.item(), stats.clipped_high.item(), stats.clipped_low.item()) == (5, 1, 1)
    assert stats.ratio_sum.item() == pytest.approx(5.0, rel=1e-6)
    assert stats.ratio_max.item() == pytest.approx(1.5, rel=1e-6)
    logs = [math.log(x) for x in (1.5, 0.5, 1.5, 0.5, 1.0)]
    assert stats.kl_k1_sum.item() == pytest.approx(-sum(logs), rel=1e-5)
    assert stats.kl_k3_sum.item() == pytest.approx(sum(math.exp(x) - 1 - x for x in logs), rel=1e-5)
    assert stats.clamped.item() == 0


@pytest.mark.parametrize("seed", range(10))
def test_against_plain_cases(seed):
    b = batch(seed=seed)
    loss, _ = loss_of(b, denominators_of(b))
    total = 0.0
    for i, t in b["mask_BT"].nonzero().tolist():
        ratio = math.exp(b["logprobs_BT"][i, t] - b["old_logprobs_BT"][i, t])
        advantage, weight = b["advantages_BT"][i, t].item(), b["weights_BT"][i, t].item()
        total += plain_token_loss(ratio, advantage, 0.2, 0.28, weight)
    assert loss.item() == pytest.approx(total / int(b["mask_BT"].sum()), rel=1e-12)


def test_on_policy_gradient_is_reinforce():
    b = batch()
    logprobs_BT = b["old_logprobs_BT"].clone().requires_grad_()
    loss, stats = loss_of(b | {"logprobs_BT": logprobs_BT}, denominators_of(b))
    loss.backward()
    expected = torch.where(b["mask_BT"], -b["weights_BT"] * b["advantages_BT"], 0.0) / b["mask_BT"].sum()
    torch.testing.assert_close(logprobs_BT.grad, expected, rtol=1e-13, atol=1e-15)
    assert (stats.ratio_max.item(), stats.kl_k3_sum.item()) == (1.0, 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode):
    b = batch(rows=4, width=3, seed=5)
    denominators = denominators_of(b)
    logprobs_BT = b["logprobs_BT"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(b | {"logprobs_BT": x}, denominators, mode)[0], [logprobs_BT])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("mode", MODES)
def test_loss_gradient_and_stats_are_invariant_to_cutting(mode, dtype, tolerance):
    b = batch(dtype=dtype)
    denominators = denominators_of(b)
    ref_BT = b["old_logprobs_BT"] - 0.1

    def total(part, ref):
        loss, stats = loss_of(part, denominators, mode)
        kl_BT, _ = token_kl(part["logprobs_BT"], ref, part["mask_BT"], "k3")
        loss, _ = add_kl(loss, kl_BT, part["mask_BT"], kl_coef=0.1, mode=mode, denominators=denominators)
        return loss, stats.as_metrics()

    whole_BT = b["logprobs_BT"].clone().requires_grad_()
    whole, whole_metrics = total(b | {"logprobs_BT": whole_BT}, ref_BT)
    whole.backward()
    rng = np.random.default_rng(0)
    for parts in (2, 4, 16):
        owner = rng.integers(0, parts, size=len(whole_BT))
        parts_BT = b["logprobs_BT"].clone().requires_grad_()
        pieces, metrics = 0.0, []
        for p in range(parts):
            loss, piece = total(rows_of(b | {"logprobs_BT": parts_BT}, owner == p), ref_BT[owner == p])
            loss.backward()
            pieces += loss.item()
            metrics.append(piece)
        assert pieces == pytest.approx(whole.item(), abs=tolerance)
        torch.testing.assert_close(parts_BT.grad, whole_BT.grad, rtol=tolerance, atol=tolerance)
        assert values(merge_metrics(metrics)) == pytest.approx(values(whole_metrics), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [40.0, -40.0, 200.0])
def test_extreme_ratios_stay_finite(log_ratio, advantage):
    logprobs_BT = torch.tensor([[log_ratio]], requires_grad=True)
    loss, stats = policy_loss(
        logprobs_BT,
        torch.zeros(1, 1),
        torch.full((1, 1), advantage),
        torch.ones(1, 1, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        weights_BT=None,
        mode="token-mean",
        denominators=Denominators(1, 1, 1),
    )
    loss.backward()
    assert all(torch.isfinite(getattr(stats, f.name)) for f in fields(stats))
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs_BT.grad).all()
    assert stats.clamped.item() == 1


def test_masked_positions_are_silent():
    clean, dirty = batch(), batch()
    for name in ("logprobs_BT", "old_logprobs_BT", "advantages_BT", "weights_BT"):
        dirty[name] = torch.where(dirty["mask_BT"], dirty[name], float("nan"))
    denominators = denominators_of(clean)
    results = []
    for b in (clean, dirty):
        logprobs_BT = b["logprobs_BT"].clone().requires_grad_()
        loss, stats = loss_of(b | {"logprobs_BT": logprobs_BT}, denominators)
        loss.backward()
        results.append((loss.item(), logprobs_BT.grad, stats.as_metrics()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("shape", [(0, 4), (2, 4)])
def test_empty_microbatch(shape):
    logprobs_BT = torch.full(shape, float("nan"), requires_grad=True)
    blank = torch.full(shape, float("nan"))
    loss, stats = policy_loss(
        logprobs_BT,
        blank,
        blank,
        torch.zeros(shape, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        weights_BT=blank,
        mode="token-mean",
        denominators=Denominators(9, 3, 4),
    )
    loss.backward()
    assert loss.item() == 0
    assert not logprobs_BT.grad.any()
    assert values(stats.as_metrics()) == {"policy/tokens": 0.0, "policy/ratio_clamped_tokens": 0.0}


def test_gradient_reaches_the_policy_only():
    b = batch()
    inputs = {k: v.clone().requires_grad_() for k, v in b.items() if k != "mask_BT"}
    loss, stats = loss_of(inputs | {"mask_BT": b["mask_BT"]}, denominators_of(b))
    loss.backward()
    assert [k for k, v in inputs.items() if v.grad is not None] == ["logprobs_BT"]
    assert not any(getattr(stats, f.name).requires_grad for f in fields(stats))


def test_add_kl():
    kl_BT = torch.tensor([[1.0, 3.0]], requires_grad=True)
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    loss, kl = add_kl(
        torch.tensor(5.0), kl_BT, mask_BT, kl_coef=0.5, mode="token-mean", denominators=Denominators(2, 1, 2)
    )
    assert (loss.item(), kl.item(), kl.requires_grad) == (6.0, 2.0, False)
    loss.backward()
    assert kl_BT.grad.tolist() == [[0.25, 0.25]]
