"""What an update learns from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.engines.rows import TokenRows


@dataclass(frozen=True)
class Experience:
    """What an update learns from: N rows in order; ragged float columns share the responses' offsets."""

    tokens: TokenRows
    groups: Tensor
    """[N] int64 position of the row's prompt in the iteration."""
    behaviour_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    scored: Tensor
    """[N] bool: the row has a reward; the others count in no denominator and teach nothing."""
    ref_logprobs: Tensor | None = None

    @property
    def active(self) -> Tensor:
        """[N] bool: rows with a gradient. Without a KL term, advantage 0 means none."""
        if self.ref_logprobs is not None:
            return self.scored
        lengths = self.tokens.response_lengths
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        # NaN != 0: a broken advantage stays active, so that the update fails instead of leaving the row out.
        counted = torch.zeros(len(lengths)).index_add(0, row, (self.advantages != 0).float())
        return self.scored & (counted > 0)
