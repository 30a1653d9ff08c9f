"""Advantage estimators. Shapes: N rows (one response each), any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import at_least_float32, group_statistics
from rlhf_core.errors import NumericsError


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of responses against their group."""

    advantages_N: Tensor
    """[N] in the dtype of the rewards, at least float32; 0 for rows without information."""
    degenerate_groups: int
    """Groups with fewer than two valid rows: nothing to compare."""
    equal_groups: int
    """Groups of two or more valid rows whose rewards are all equal: nothing to learn."""


def group_relative(
    rewards_N: Tensor,
    groups_N: Tensor,
    valid_N: Tensor,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> GroupAdvantages:
    """GRPO advantages (arXiv 2402.03300): (r - mean) / (std + epsilon) over the group, std with ddof = 1.

    ``normalize_std=False`` gives r - mean (Dr. GRPO, arXiv 2503.20783). A group with fewer than two valid rows has
    advantage 0, and so has a group whose rewards are all equal; maximum == minimum decides that, so that rounding of
    the mean cannot invent a signal. Computed in float64.

    Args:
        rewards_N: [N] float.
        groups_N: [N] int64 group ids, any values, any order.
        valid_N: [N] bool; rows without a reward are left out of the statistics and get 0, whatever their reward holds.
        normalize_std: divide by the standard deviation.
        epsilon: added to the standard deviation.

    Raises ValueError for shapes that differ, NumericsError for a valid reward that is NaN or infinite.
    """
    if not (rewards_N.shape == groups_N.shape == valid_N.shape and rewards_N.dim() == 1):
        shapes = [tuple(t.shape) for t in (rewards_N, groups_N, valid_N)]
        raise ValueError(f"rewards, groups and valid must share one shape [N]: {shapes}")
    valid_N = valid_N.bool()
    broken_N = valid_N & ~torch.isfinite(rewards_N)
    if bool(broken_N.any()):
        row = int(broken_N.nonzero()[0])
        raise NumericsError(
            f"{int(broken_N.sum())} valid rewards are not finite, the first is {float(rewards_N[row])} in row {row} "
            f"of group {int(groups_N[row])}: mark such rows as not valid"
        )
    ids_G, group_N = torch.unique(groups_N, return_inverse=True)
    stats = group_statistics(rewards_N, group_N, valid_N, ids_G.numel())
    degenerate_G = stats.counts_G < 2
    equal_G = ~degenerate_G & (stats.maximum_G == stats.minimum_G)

    advantages_N = rewards_N.double() - stats.mean_G[group_N]
    if normalize_std:
        advantages_N = advantages_N / (stats.std_G[group_N] + epsilon)
    informative_N = valid_N & ~(degenerate_G | equal_G)[group_N]
    advantages_N = torch.where(informative_N, advantages_N, advantages_N.new_zeros(()))
    return GroupAdvantages(
        advantages_N=advantages_N.to(at_least_float32(rewards_N).dtype),
        degenerate_groups=int(degenerate_G.sum()),
        equal_groups=int(equal_G.sum()),
    )


def per_token(advantages_N: Tensor, lengths_N: Tensor) -> Tensor:
    """The advantage of each response at each of its tokens: flat [sum(lengths)], row after row.

    Args:
        advantages_N: [N].
        lengths_N: [N] int64 response tokens; 0 is allowed.
    """
    return torch.repeat_interleave(advantages_N, lengths_N)
