"""Correction for the difference between the engine that sampled and the trainer that learns.

Both compute logprobs of the same tokens at (nearly) the same weights with other kernels and precision. The log-ratio is
d = logp_old (trainer) - logp_behaviour (engine), both after temperature. Shapes: B rows, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import keep, masked_max, masked_sum
from rlhf_core.metrics import Max, Mean, Metric, Sum

#: exp(2 * 300) still is a float64; a logprob difference of 300 is only ever a fault, and shows as the maximum.
_EXPONENT_LIMIT = 300.0


def importance_weights(old_logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, mask_BT: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(exp(d), cap) of tokens: [B, T], at least float32, no gradient, 0 off the mask.

    Truncated, not dropped (Ionides 2008; for engine mismatch: Yao et al. 2025). Raises ValueError unless cap > 0.
    """
    if not cap > 0:
        raise ValueError(f"cap = {cap}: the bound of an importance weight is positive")
    d_BT = keep(old_logprobs_BT.detach(), mask_BT) - keep(behaviour_logprobs_BT.detach(), mask_BT)
    # exp may overflow to inf here: the minimum with the cap is still right.
    return keep(torch.exp(d_BT).clamp(max=cap), mask_BT)


@dataclass(frozen=True, slots=True)
class MismatchStats:
    """Float64 scalars over the mask, of the raw log-ratio d before any truncation. Sums add up; the maximum merges."""

    tokens: Tensor
    log_ratio_sum: Tensor
    """Sum of d. Its negative mean estimates KL(engine || trainer)."""
    abs_sum: Tensor
    abs_max: Tensor
    """-inf without tokens."""
    k3_sum: Tensor
    """Sum of exp(d) - 1 - d, the non-negative estimate of the same KL."""
    chi_square_sum: Tensor
    """Sum of exp(2 d) - 1: its mean estimates the chi-square divergence of trainer from engine."""
    truncated: Tensor
    """Tokens whose weight exp(d) is above the cap; 0 without a cap."""

    def as_metrics(self) -> dict[str, Metric]:
        """Metrics ``mismatch/...`` that merge over micro-batches and ranks. Copies to the host once."""
        names = ("tokens", "log_ratio_sum", "abs_sum", "abs_max", "k3_sum", "chi_square_sum", "truncated")
        stacked = torch.stack([getattr(self, name) for name in names]).tolist()
        tokens, total, absolute, largest, k3, chi_square, truncated = stacked
        return {
            "mismatch/tokens": Sum(tokens),
            "mismatch/log_ratio": Mean(total, tokens),
            "mismatch/log_ratio_abs": Mean(absolute, tokens),
            "mismatch/log_ratio_abs_max": Max(largest),
            "mismatch/kl_k3": Mean(k3, tokens),
            "mismatch/chi_square": Mean(chi_square, tokens),
            "mismatch/truncated_fraction": Mean(truncated, tokens),
        }


@torch.no_grad()
def mismatch(
    old_logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, mask_BT: Tensor, cap: float | None = None
) -> MismatchStats:
    """How far trainer and engine are apart, raw, in float64.

    Args:
        old_logprobs_BT: [B, T] of the trainer.
        behaviour_logprobs_BT: [B, T] of the engine.
        mask_BT: [B, T] bool.
        cap: the bound that ``importance_weights`` uses, only to count the tokens it truncates; None if it is not used.
    """
    d_BT = keep(old_logprobs_BT, mask_BT).double() - keep(behaviour_logprobs_BT, mask_BT).double()
    bounded_BT = d_BT.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    above_BT = torch.zeros_like(mask_BT) if cap is None else torch.exp(bounded_BT) > cap
    return MismatchStats(
        tokens=mask_BT.bool().sum().double(),
        log_ratio_sum=masked_sum(d_BT, mask_BT),
        abs_sum=masked_sum(d_BT.abs(), mask_BT),
        abs_max=masked_max(d_BT.abs(), mask_BT),
        k3_sum=masked_sum(torch.expm1(bounded_BT) - d_BT, mask_BT),
        chi_square_sum=masked_sum(torch.expm1(2 * bounded_BT), mask_BT),
        truncated=masked_sum(above_BT, mask_BT),
    )
