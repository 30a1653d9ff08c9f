"""Token rows as the trainer sees them: flat tensors, cut into right-padded micro-batches.

A *unit* is what one sequence of a micro-batch holds: a single row, or, with shared prompts, all rows of one group behind one
copy of their prompt (each response attends to the prompt and to itself only). Sharing saves the prompt's compute for all but
one sample; it pays when prompts are long compared with responses. Without it, prompt and response stand at the left and
padding at the right, so that plain causal attention needs no mask: no real token can see a padded one.

Shapes: N rows, B units of a micro-batch, T padded width, K rows of the micro-batch, R response tokens of it (flat).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch."""

    input_ids_BT: Tensor
    """[B, T] int64, right-padded with 0."""
    position_ids_BT: Tensor
    """[B, T] int64: a response's positions continue its prompt's."""
    mask_B1TT: Tensor | None
    """[B, 1, T, T] bool, query by key; None where plain causal attention is right."""
    states_R: Tensor
    """[R] int64 indices into the flattened [B * T] hidden states: the state that predicts each response token."""
    targets_R: Tensor
    """[R] int64 response tokens, row after row."""
    lengths_K: Tensor
    """[K] int64 response tokens of each row."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        mask = None if self.mask_B1TT is None else self.mask_B1TT.to(device)
        ids, positions, states, targets, lengths = (
            t.to(device)
            for t in (self.input_ids_BT, self.position_ids_BT, self.states_R, self.targets_R, self.lengths_K)
        )
        return Batch(ids, positions, mask, states, targets, lengths)


@dataclass(frozen=True)
class TokenRows:
    """All rows of an iteration: flat int32 values and int64 offsets [N + 1] of prompts and responses."""

    prompt_values: Tensor
    prompt_offsets: Tensor
    response_values: Tensor
    response_offsets: Tensor

    @property
    def prompt_lengths(self) -> Tensor:
        """[N] int64."""
        return self.prompt_offsets.diff()

    @property
    def response_lengths(self) -> Tensor:
        """[N] int64."""
        return self.response_offsets.diff()

    def unit_lengths(self, units: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens of each unit, [U] int64: all of them, and those of its responses."""
        responses = torch.tensor([int(self.response_lengths[list(unit)].sum()) for unit in units], dtype=torch.int64)
        prompts = self.prompt_lengths[torch.tensor([unit[0] for unit in units], dtype=torch.int64)]
        return prompts + responses, responses

    def batch(self, units: Sequence[Sequence[int]]) -> Batch:
        """The micro-batch of these units. An empty one is a single padded row without response tokens, because every
        ZeRO-3 rank has to run the same forward and backward passes."""
        if not units:
            empty, two = torch.zeros(0, dtype=torch.int64), torch.arange(2).unsqueeze(0)
            return Batch(torch.zeros_like(two), two, None, empty, empty, torch.zeros(1, dtype=torch.int64))
        rows_K = torch.tensor([row for unit in units for row in unit], dtype=torch.int64)
        unit_K = torch.repeat_interleave(torch.arange(len(units)), torch.tensor([len(unit) for unit in units]))
        first_B = torch.tensor([unit[0] for unit in units], dtype=torch.int64)
        prompts_B, lengths_K = self.prompt_lengths[first_B], self.response_lengths[rows_K]
        total_B = torch.zeros_like(prompts_B).index_add_(0, unit_K, lengths_K)
        width = int((prompts_B + total_B).max())
        before_B = total_B.cumsum(0) - total_B
        start_K = prompts_B[unit_K] + lengths_K.cumsum(0) - lengths_K - before_B[unit_K]

        row_R = torch.repeat_interleave(torch.arange(len(rows_K)), lengths_K)
        within_R = torch.arange(len(row_R)) - (lengths_K.cumsum(0) - lengths_K)[row_R]
        flat_R = unit_K[row_R] * width + start_K[row_R] + within_R
        prompt_R = prompts_B[unit_K[row_R]]
        targets_R = gather_rows(self.response_values, self.response_offsets, rows_K).to(torch.int64)

        input_ids = torch.zeros(len(units), width, dtype=torch.int64)
        input_ids[torch.arange(width) < prompts_B[:, None]] = gather_rows(
            self.prompt_values, self.prompt_offsets, first_B
        ).to(torch.int64)
        input_ids.view(-1)[flat_R] = targets_R
        position_ids = torch.arange(width).repeat(len(units), 1)
        position_ids.view(-1)[flat_R] = prompt_R + within_R
        last_prompt_R = unit_K[row_R] * width + prompt_R - 1
        states_R = torch.where(within_R == 0, last_prompt_R, flat_R - 1)
        mask = None
        if len(rows_K) > len(units):
            order_K = torch.arange(len(rows_K))
            segment = torch.full((len(units) * width,), -1, dtype=torch.int64)
            segment[flat_R] = order_K[row_R] + 1
            mask = _shared_prompt_mask(segment.view(len(units), width), prompts_B)
        return Batch(input_ids, position_ids, mask, states_R, targets_R, lengths_K)


def _shared_prompt_mask(segment_BT: Tensor, prompts_B: Tensor) -> Tensor:
    """[B, 1, T, T] bool. ``segment_BT`` numbers the responses from 1; -1 elsewhere, where the first ``prompts_B`` columns are
    the prompt. Padding sees padding, so that no query is left without a key (its softmax would be NaN)."""
    width = segment_BT.shape[1]
    column = torch.arange(width)
    segment_BT = torch.where(column < prompts_B[:, None], torch.zeros_like(segment_BT), segment_BT)
    query, key = segment_BT[:, :, None], segment_BT[:, None, :]
    visible = ((key == 0) & (query != -1)) | (key == query)
    return (visible & (column[:, None] >= column[None, :])).unsqueeze(1)


def units_of(rows: Sequence[int], groups: Tensor, share_prompts: bool) -> list[list[int]]:
    """Cut rows into units: by group when prompts are shared, else each on its own. Rows keep their order."""
    if not share_prompts:
        return [[row] for row in rows]
    units: dict[int, list[int]] = {}
    for row, group in zip(rows, groups[torch.as_tensor(rows, dtype=torch.int64)].tolist(), strict=True):
        units.setdefault(group, []).append(row)
    return list(units.values())


def gather_rows(values: Tensor, offsets: Tensor, rows: Tensor | Sequence[int]) -> Tensor:
    """Concatenated values of these rows of a ragged column, without a Python loop over tokens."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    lengths = offsets.diff()[index]
    starts = torch.repeat_interleave(offsets[:-1][index], lengths)
    within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return values[starts + within]
