"""KL to the reference policy, estimated per token from the sampled token alone.

Shapes: B rows, T response positions. d = logp - logp_ref, samples from the policy, so E[d] is KL(policy || reference).
Estimators: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import keep, masked_sum

KLEstimator = Literal["k1", "k2", "k3"]

#: exp(20) is 4.9e8: beyond it a token's estimate says nothing but that the two models disagree.
EXPONENT_LIMIT = 20.0


def token_kl(
    logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor, estimator: KLEstimator
) -> tuple[Tensor, Tensor]:
    """Per-token KL estimate, with gradient to both inputs.

    - ``k1``: d
    - ``k2``: d^2 / 2
    - ``k3``: exp(-d) - 1 + d

    Only the exponential of k3 is bounded: its exponent is cut at ``EXPONENT_LIMIT`` from above. Its slope is kept at
    the cut, because a constant would leave the slope of d alone, which pushes such a token away from the reference.

    Args:
        logprobs_BT: [B, T] of the policy.
        ref_logprobs_BT: [B, T] of the reference, usually without gradient.
        mask_BT: [B, T] bool; other positions give exactly 0, whatever they hold.
        estimator: see above.

    Returns:
        kl_BT: [B, T], at least float32 (d is taken in it).
        clamped_tokens: float64 scalar, tokens whose exponent was cut (0 for k1 and k2, which have none).
    """
    d_BT = keep(logprobs_BT, mask_BT) - keep(ref_logprobs_BT, mask_BT)
    nothing = torch.zeros((), dtype=torch.float64, device=d_BT.device)
    if estimator == "k1":
        return d_BT, nothing
    if estimator == "k2":
        return d_BT.square() / 2, nothing
    if estimator == "k3":
        excess_BT = (-d_BT.detach() - EXPONENT_LIMIT).clamp(min=0)
        # expm1 keeps the digits of small d, where exp(-d) - 1 cancels.
        return torch.expm1(-d_BT - excess_BT) + d_BT, masked_sum(excess_BT > 0, mask_BT)
    raise ValueError(f"unknown KL estimator {estimator!r}")
