"""KL estimators: values, gradients, expectations, extreme log-ratios."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.kl import EXPONENT_LIMIT, token_kl

DTYPES = (torch.float64, torch.float32)
FORMULAS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
SLOPES = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}


def true(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("estimator", FORMULAS)
def test_values_and_gradients(estimator, dtype):
    d = [-3.0, -0.5, 0.0, 0.25, 2.0]
    logprobs_BT = torch.tensor([d], dtype=dtype).sub(4).requires_grad_()
    kl_BT, clamped = token_kl(logprobs_BT, torch.full((1, 5), -4.0, dtype=dtype), true(1, 5), estimator)
    kl_BT.sum().backward()
    assert kl_BT.dtype == dtype
    assert kl_BT[0].tolist() == pytest.approx([FORMULAS[estimator](x) for x in d], rel=1e-6, abs=1e-7)
    assert logprobs_BT.grad[0].tolist() == pytest.approx([SLOPES[estimator](x) for x in d], rel=1e-6, abs=1e-7)
    assert clamped.item() == 0


@pytest.mark.parametrize("estimator", FORMULAS)
def test_gradcheck(estimator):
    inputs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda a, b: token_kl(a, b, true(2, 3), estimator)[0], inputs)


def test_expectation_is_the_kl():
    # exact expectation over a small vocabulary: E[k1] = E[k3] = KL; and the gradient of E[k2] is that of KL
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref_V = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp_V = logits_V.log_softmax(-1)
    exact = (logp_V.exp() * (logp_V - ref_V)).sum()
    weight_V = logp_V.exp().detach()
    expected = {k: (weight_V * token_kl(logp_V, ref_V, true(6), k)[0]).sum() for k in FORMULAS}
    assert expected["k1"].item() == pytest.approx(exact.item(), rel=1e-12)
    assert expected["k3"].item() == pytest.approx(exact.item(), rel=1e-12)
    gradient = {k: torch.autograd.grad(v, logits_V, retain_graph=True)[0] for k, v in expected.items()}
    truth = torch.autograd.grad(exact, logits_V)[0]
    torch.testing.assert_close(gradient["k2"], truth, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient["k1"], torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-14)
    assert not torch.allclose(gradient["k3"], truth, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_ratios_are_finite_and_counted(dtype):
    logprobs_BT = torch.tensor([[-40.0, 0.0, -20.0, -20.5]], dtype=dtype, requires_grad=True)
    ref_BT = torch.tensor([[0.0, -40.0, 0.0, 0.0]], dtype=dtype)
    kl_BT, clamped = token_kl(logprobs_BT, ref_BT, true(1, 4), "k3")
    kl_BT.sum().backward()
    top = math.exp(EXPONENT_LIMIT) - 1
    assert clamped.item() == 2
    assert kl_BT[0].tolist() == pytest.approx([top - 40, 39.0, top - 20, top - 20.5], rel=1e-6)
    # the slope stays at the cut and keeps its sign: such a token is pulled towards the reference
    assert logprobs_BT.grad[0].tolist() == pytest.approx([-top, 1.0, -top, -top], rel=1e-5)
    for estimator in ("k1", "k2"):
        assert token_kl(logprobs_BT, ref_BT, true(1, 4), estimator)[1].item() == 0


def test_k3_keeps_digits_of_small_ratios():
    d = 1e-3
    kl_BT, _ = token_kl(torch.tensor([[d]]), torch.zeros(1, 1), true(1, 1), "k3")
    assert kl_BT.item() == pytest.approx(d * d / 2, rel=2e-3)


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), -1e30])
def test_masked_positions_are_silent(estimator, bad):
    logprobs_BT = torch.tensor([[-1.0, bad]], requires_grad=True)
    ref_BT = torch.tensor([[-2.0, float("nan")]])
    kl_BT, clamped = token_kl(logprobs_BT, ref_BT, torch.tensor([[True, False]]), estimator)
    kl_BT.sum().backward()
    assert kl_BT[0, 1].item() == 0
    assert clamped.item() == 0
    assert torch.isfinite(kl_BT).all()
    assert torch.isfinite(logprobs_BT.grad).all()
    assert logprobs_BT.grad[0, 1].item() == 0


def test_bfloat16_is_widened_and_names_are_checked():
    kl_BT, _ = token_kl(torch.zeros(1, 2).bfloat16(), torch.ones(1, 2).bfloat16(), true(1, 2), "k1")
    assert kl_BT.dtype == torch.float32
    with pytest.raises(ValueError, match="'k4'"):
        token_kl(torch.zeros(1), torch.zeros(1), true(1), "k4")
