"""Masked sums and means: the only place in the algorithms that divides by a count.

Shapes: B rows (one whole response each), T response positions, N rows or tokens in flat form, G groups.

Every denominator is global: it counts the tokens or sequences of the whole optimizer step, over all ranks and
micro-batches, and is passed in. So the sum of ``aggregate`` over any split of the step into micro-batches and ranks is
the value on the whole batch. One factor is the engine's business, not this module's: DeepSpeed averages gradients
over the data-parallel ranks, so the engine multiplies the loss by their number before ``backward``, to get the gradient of
the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """What one optimizer step divides by, over all its ranks and micro-batches."""

    tokens: int
    """Response tokens that count."""
    sequences: int
    """Responses with at least one such token."""
    norm_length: int
    """Constant divisor of a sequence in ``seq-mean-token-sum-norm``: the longest response allowed."""

    def __post_init__(self) -> None:
        if self.sequences < 0 or self.tokens < self.sequences:
            raise ValueError(f"{self}: every counted sequence has at least one token")
        if self.norm_length < 1:
            raise ValueError(f"norm_length = {self.norm_length}: it is the longest response allowed, at least 1")


def count(lengths: Sequence[int] | np.ndarray, *, norm_length: int) -> Denominators:
    """Denominators of an optimizer step.

    Args:
        lengths: [N] counted response tokens (true mask entries) of every row of the step, over all ranks. A row that is
            skipped only because its gradient is known to be 0 (advantage 0, no KL) belongs to the step; a row without a
            reward does not.
        norm_length: the longest response allowed (``generate.max_new_tokens``), a constant of the run.

    A row without tokens counts nowhere. Raises ValueError for negative lengths.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if lengths_N.size and lengths_N.min() < 0:
        raise ValueError(f"a response of {lengths_N.min()} tokens: lengths are counts")
    return Denominators(int(lengths_N.sum()), int((lengths_N > 0).sum()), norm_length)


def at_least_float32(values: Tensor) -> Tensor:
    """bfloat16 and float16 become float32; float64 stays, so that gradients can be checked."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def keep(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """At least float32, with 0 where the mask is false.

    Selects instead of multiplying, because 0 * NaN is NaN. Apply it to inputs, before any exponential: then neither the
    value nor the gradient of a masked position can become NaN.
    """
    values_BT = at_least_float32(values_BT)
    return torch.where(mask_BT.bool(), values_BT, values_BT.new_zeros(()))


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Float64 sum over the mask, without gradient: a statistic that adds up over micro-batches."""
    return keep(values_BT.detach(), mask_BT).sum(dtype=torch.float64)


def masked_max(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Float64 maximum over the mask, without gradient; -inf if the mask is empty."""
    values_BT = at_least_float32(values_BT.detach()).double()
    floor = values_BT.new_full((), -torch.inf)
    if values_BT.numel() == 0:
        return floor
    return torch.where(mask_BT.bool(), values_BT, floor).max()


def aggregate(values_BT: Tensor, mask_BT: Tensor, mode: AggregationMode, denominators: Denominators) -> Tensor:
    """This micro-batch's share of the step's mean of token values, as a scalar with gradient.

    With m the mask, v the values, N tokens and S non-empty sequences of the step, and L = ``norm_length``:

    - ``token-mean``: sum(m v) / N
    - ``seq-mean-token-mean``: sum_i [sum_t(m v) / sum_t(m)] / S
    - ``seq-mean-token-sum``: sum(m v) / S
    - ``seq-mean-token-sum-norm``: sum(m v) / (S L), the constant length of Dr. GRPO (arXiv 2503.20783)

    Args:
        values_BT: [B, T] token values; a row is one whole response, at any columns (padding and holes are masked).
        mask_BT: [B, T] bool, the tokens that count. A fully masked row counts nowhere.
        mode: see above.
        denominators: counts of the whole optimizer step.

    Raises ValueError for an unknown mode, shapes that differ, or tokens here that the denominators say do not exist.
    """
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"values have shape {tuple(values_BT.shape)}, the mask has {tuple(mask_BT.shape)}")
    kept_BT = keep(values_BT, mask_BT)
    if mode == "token-mean":
        return _divide(kept_BT.sum(), denominators.tokens, mask_BT)
    if mode == "seq-mean-token-mean":
        tokens_B = mask_BT.bool().sum(dim=-1).clamp(min=1)
        return _divide((kept_BT.sum(dim=-1) / tokens_B).sum(), denominators.sequences, mask_BT)
    if mode == "seq-mean-token-sum":
        return _divide(kept_BT.sum(), denominators.sequences, mask_BT)
    if mode == "seq-mean-token-sum-norm":
        return _divide(kept_BT.sum(), denominators.sequences * denominators.norm_length, mask_BT)
    raise ValueError(f"unknown aggregation {mode!r}")


def _divide(total: Tensor, divisor: int, mask_BT: Tensor) -> Tensor:
    if divisor == 0:
        # Only a step without any counted token has divisor 0, and then the total is 0 and keeps its graph.
        if bool(mask_BT.any()):
            raise ValueError("the denominators say the step has no tokens, but this mask has: count over the same rows")
        return total
    return total / divisor


def length_mask(lengths_B: Tensor, width: int) -> Tensor:
    """[B, width] bool: the first ``lengths_B[i]`` columns of row i."""
    return torch.arange(width, device=lengths_B.device) < lengths_B.unsqueeze(-1)


def pad_rows(flat_N: Tensor, lengths_B: Tensor, width: int) -> Tensor:
    """Flat tokens, row after row without padding, as [B, width] right-padded with 0; the gradient flows.

    Raises ValueError if a length exceeds the width or the lengths do not add up to N.
    """
    mask_BT = length_mask(lengths_B, width)
    if int(mask_BT.sum()) != flat_N.numel() or int(lengths_B.sum()) != flat_N.numel():
        raise ValueError(
            f"{flat_N.numel()} tokens do not fill rows of {lengths_B.tolist()} tokens in {width} columns: "
            "the lengths must add up to the tokens and fit the width"
        )
    return flat_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, flat_N)


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of G groups in float64. A group without valid rows has mean 0, std 0 and infinite bounds."""

    counts_G: Tensor
    """[G] int64, valid rows."""
    mean_G: Tensor
    std_G: Tensor
    """[G] sample standard deviation (ddof = 1); 0 for fewer than two rows."""
    minimum_G: Tensor
    maximum_G: Tensor


def group_statistics(values_N: Tensor, group_N: Tensor, valid_N: Tensor, groups: int) -> GroupStatistics:
    """Statistics of ``values_N`` [N] over the rows with ``valid_N`` [N], by ``group_N`` [N] int64 in 0 .. groups - 1.

    Two passes in float64: the deviations are taken from the mean, so a large common offset costs no digits.
    """
    values = keep(values_N, valid_N).double()
    zeros_G = values.new_zeros(groups)
    counts_G = torch.zeros(groups, dtype=torch.int64, device=values.device).index_add(0, group_N, valid_N.long())
    mean_G = zeros_G.index_add(0, group_N, values) / counts_G.clamp(min=1)
    deviations_N = keep(values - mean_G[group_N], valid_N)
    variance_G = zeros_G.index_add(0, group_N, deviations_N.square()) / (counts_G - 1).clamp(min=1)
    infinity = values.new_full((), torch.inf)
    return GroupStatistics(
        counts_G=counts_G,
        mean_G=mean_G,
        std_G=variance_G.sqrt(),
        minimum_G=(zeros_G + infinity).scatter_reduce(0, group_N, torch.where(valid_N, values, infinity), "amin"),
        maximum_G=(zeros_G - infinity).scatter_reduce(0, group_N, torch.where(valid_N, values, -infinity), "amax"),
    )
