"""The policy loss. Shapes: B rows (one whole response each), T response positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import AggregationMode, Denominators, aggregate, keep, masked_max, masked_sum
from rlhf_core.metrics import Max, Mean, Metric, Sum

#: The log-ratio is cut at +-20 inside the exponential, far outside any clip range.
EXPONENT_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLossStats:
    """Float64 scalars over the mask of one micro-batch, without gradient. Sums add up; the maximum merges."""

    tokens: Tensor
    clipped_low: Tensor
    """Tokens with negative advantage whose ratio is below 1 - clip_low: they have no gradient."""
    clipped_high: Tensor
    """Tokens with positive advantage whose ratio is above 1 + clip_high: they have no gradient."""
    ratio_sum: Tensor
    ratio_max: Tensor
    kl_k1_sum: Tensor
    """Sum of logp_old - logp: estimates KL(old || new), because the tokens come from the old policy."""
    kl_k3_sum: Tensor
    """Sum of ratio - 1 - log(ratio), the non-negative estimate of the same."""
    clamped: Tensor
    """Tokens whose log-ratio was cut inside the exponential."""

    def as_metrics(self) -> dict[str, Metric]:
        """Metrics ``policy/...`` that merge over micro-batches and ranks. Copies to the host once."""
        names = ("tokens", "clipped_low", "clipped_high", "ratio_sum", "ratio_max", "kl_k1_sum", "kl_k3_sum", "clamped")
        stacked = torch.stack([getattr(self, name) for name in names]).tolist()
        tokens, low, high, ratio, ratio_max, k1, k3, clamped = stacked
        return {
            "policy/tokens": Sum(tokens),
            "policy/clip_low_fraction": Mean(low, tokens),
            "policy/clip_high_fraction": Mean(high, tokens),
            "policy/ratio": Mean(ratio, tokens),
            "policy/ratio_max": Max(ratio_max),
            "policy/old_new_kl_k1": Mean(k1, tokens),
            "policy/old_new_kl_k3": Mean(k3, tokens),
            "policy/ratio_clamped_tokens": Sum(clamped),
        }


def policy_loss(  # noqa: PLR0913 - nine inputs of one formula; a bundle would only hide them
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights_BT: Tensor | None,
    mode: AggregationMode,
    denominators: Denominators,
) -> tuple[Tensor, PolicyLossStats]:
    """This micro-batch's share of the clipped surrogate (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476).

    ratio = exp(logp - logp_old); token loss = -w min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); then
    ``aggregate``. No dual clip.

    Args:
        logprobs_BT: [B, T] of the policy being trained, with gradient.
        old_logprobs_BT: [B, T] of the policy at the start of the iteration, computed by the trainer.
        advantages_BT: [B, T].
        mask_BT: [B, T] bool; other positions may hold anything, NaN included.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        weights_BT: [B, T] importance weights (``correction.importance_weights``), taken as constants; None for 1.
        mode: how token losses become one number.
        denominators: counts of the whole optimizer step.

    Returns:
        loss: scalar, at least float32. Add it up over micro-batches and ranks.
        stats: sums of this micro-batch.
    """
    new_BT, old_BT = keep(logprobs_BT, mask_BT), keep(old_logprobs_BT.detach(), mask_BT)
    advantages_BT = keep(advantages_BT.detach(), mask_BT)
    log_ratio_BT = new_BT - old_BT
    ratio_BT = torch.exp(log_ratio_BT.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if weights_BT is not None:
        loss_BT = loss_BT * keep(weights_BT.detach(), mask_BT)
    loss = aggregate(loss_BT, mask_BT, mode, denominators)

    with torch.no_grad():
        stats = PolicyLossStats(
            tokens=mask_BT.bool().sum().double(),
            clipped_low=masked_sum((advantages_BT < 0) & (ratio_BT < 1 - clip_low), mask_BT),
            clipped_high=masked_sum((advantages_BT > 0) & (ratio_BT > 1 + clip_high), mask_BT),
            ratio_sum=masked_sum(ratio_BT, mask_BT),
            ratio_max=masked_max(ratio_BT, mask_BT),
            kl_k1_sum=masked_sum(-log_ratio_BT, mask_BT),
            kl_k3_sum=masked_sum(
                torch.expm1(log_ratio_BT.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)) - log_ratio_BT, mask_BT
            ),
            clamped=masked_sum(log_ratio_BT.abs() > EXPONENT_LIMIT, mask_BT),
        )
    return loss, stats


def add_kl(
    loss: Tensor, kl_BT: Tensor, mask_BT: Tensor, *, kl_coef: float, mode: AggregationMode, denominators: Denominators
) -> tuple[Tensor, Tensor]:
    """(loss + kl_coef * KL, KL without gradient), the KL aggregated in the same mode as the policy loss.

    ``kl_BT`` comes from ``kl.token_kl``. Both results are shares that add up over micro-batches and ranks.
    """
    kl = aggregate(kl_BT, mask_BT, mode, denominators)
    return loss + kl_coef * kl, kl.detach()
