"""Chunked logprobs and entropy against plain log_softmax, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlhf_core.algorithms.logprobs import CHUNK_ROWS, chunked_head_logprobs

DTYPES = (torch.float64, torch.float32)
CHUNKS = (1, 3, 7, 64)


def token_logprobs(logits, targets, temperature=1.0, chunk_rows=CHUNK_ROWS):
    """Of logits as they are: the head changes nothing."""
    return chunked_head_logprobs(logits, lambda chunk: chunk, targets, temperature, chunk_rows)


def plain(logits, targets, temperature):
    """A second opinion: the whole log_softmax in one piece."""
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def sample(rows, vocabulary=50, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 5
    return logits.to(dtype), torch.randint(0, vocabulary, (rows,), generator=generator)


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert entropy.item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), rel=1e-6)
    # temperature 1/2 squares the odds
    assert token_logprobs(logits, torch.tensor([1]), 0.5)[0].item() == pytest.approx(math.log(0.9), rel=1e-6)
    uniform = token_logprobs(torch.full((1, 8), 3.3), torch.tensor([2]))
    assert [x.item() for x in uniform] == pytest.approx([-math.log(8), math.log(8)], rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_rows", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_matches_log_softmax(dtype, chunk_rows, temperature):
    logits, targets = sample(20, dtype=dtype)
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            logprobs, entropy = token_logprobs(logits, targets, temperature, chunk_rows)
        expected = plain(logits, targets, temperature)
        assert logprobs.dtype == entropy.dtype == dtype
        assert logprobs.shape == entropy.shape == targets.shape
        torch.testing.assert_close(logprobs, expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(entropy, expected[1], rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_gradient_matches_autograd(dtype, chunk_rows):
    logits, targets = sample(20, dtype=dtype)
    weights = torch.linspace(-1, 2, 20, dtype=dtype)
    gradients = []
    for function in (lambda x: token_logprobs(x, targets, 0.7, chunk_rows), lambda x: plain(x, targets, 0.7)):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = function(leaf)
        (weights * logprobs + 0.1 * weights.square() * entropy).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=2e-6)


def test_gradcheck():
    logits, targets = sample(6, vocabulary=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.8, 2), [logits.requires_grad_()])


@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_a_row_does_not_depend_on_its_neighbours(chunk_rows):
    logits, targets = sample(33, vocabulary=1000)
    whole = token_logprobs(logits, targets, chunk_rows=33)
    chunked = token_logprobs(logits, targets, chunk_rows=chunk_rows)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    shuffled = token_logprobs(logits[order], targets[order], chunk_rows=chunk_rows)
    for a, b, c in zip(whole, chunked, shuffled, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
        assert torch.equal(c, b[order])


def test_same_call_same_bits():
    logits, targets = sample(20, vocabulary=1000)
    first, second = (token_logprobs(logits, targets, 0.9, 8) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_bfloat16_logits_are_scored_in_float32():
    logits, targets = sample(6, dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(logits, targets)
    expected = plain(logits.float(), targets, 1.0)
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("sharpness", [1.0, 30.0, 300.0])
def test_float32_entropy_error_does_not_grow_with_the_logits(sharpness):
    logits, targets = sample(64, vocabulary=1000, dtype=torch.float64)
    logits = (logits * sharpness / 5).float()
    truth = token_logprobs(logits.double(), targets)
    logprobs, entropy = token_logprobs(logits, targets)
    torch.testing.assert_close(logprobs.double(), truth[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), truth[1], rtol=1e-6, atol=1e-6)
    assert (entropy >= 0).all()


def test_extreme_and_forbidden_logits():
    logits = torch.tensor(
        [[1e4, -1e4, 0.0, -float("inf")], [0.0, 0.0, -float("inf"), -float("inf")]], requires_grad=True
    )
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 1]))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == pytest.approx([0.0, -math.log(2)])
    assert entropy.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_head_in_chunks_matches_the_whole(dtype, chunk_rows):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(17, 8, generator=generator, dtype=dtype)
    weight = torch.randn(30, 8, generator=generator, dtype=dtype)
    targets_N = torch.randint(0, 30, (17,), generator=generator)
    results = []
    for chunked in (True, False):
        hidden_ND, weight_VD = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

        def head(h, w=weight_VD):
            return nn.functional.linear(h, w)

        if chunked:
            logprobs_N, entropy_N = chunked_head_logprobs(hidden_ND, head, targets_N, 0.7, chunk_rows)
        else:
            logprobs_N, entropy_N = plain(head(hidden_ND), targets_N, 0.7)
        (logprobs_N.sum() - 0.3 * entropy_N.sum()).backward()
        results.append((logprobs_N.detach(), entropy_N.detach(), hidden_ND.grad, weight_VD.grad))
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


def test_full_logits_never_exist():
    seen = []
    linear = nn.Linear(8, 30)

    def head(hidden):
        seen.append(len(hidden))
        return linear(hidden)

    hidden_ND = torch.randn(10, 8, requires_grad=True)
    logprobs_N, _ = chunked_head_logprobs(hidden_ND, head, torch.zeros(10, dtype=torch.int64), chunk_rows=4)
    assert seen == [4, 4, 2]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        chunked_head_logprobs(hidden_ND, linear, torch.zeros(10, dtype=torch.int64), chunk_rows=4)
    assert max(sizes, default=0) < 10 * 30
    logprobs_N.sum().backward()
    assert sorted(seen) == [2, 2, 4, 4, 4, 4]
    assert linear.weight.grad is not None


def test_no_rows():
    leaf = torch.zeros(0, 5, requires_grad=True)
    logprobs, entropy = token_logprobs(leaf, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    linear = nn.Linear(5, 7)
    logprobs_N, _ = chunked_head_logprobs(torch.zeros(0, 5), linear, torch.zeros(0, dtype=torch.int64))
    logprobs_N.sum().backward()
    assert not linear.weight.grad.any()  # the head takes part even in an empty micro-batch


def test_bad_arguments():
    logits, targets = sample(3)
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(logits, targets, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_rows = 0"):
        token_logprobs(logits, targets, chunk_rows=0)
    with pytest.raises(ValueError, match="targets have shape"):
        token_logprobs(logits, targets[:2])
