"""Logprobs of a trainer rank for comparisons, in the layouts and micro-batches of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlhf_core.algorithms.parity import ParityRows
from rlhf_core.engines.rows import TokenRows, units_of

if TYPE_CHECKING:
    from rlhf_core.engines.zero3_engine import Zero3Engine


def layout_logprobs(engine: Zero3Engine, rows: ParityRows) -> dict[int, np.ndarray] | str:
    """This rank's share of the rows as an update would compute them: row -> logprobs at temperature 1; collective.

    Where the settings share prompts and the model does not let samples do so, why.
    """
    optim = engine.settings.optim
    if optim.share_prompts and engine.policy.kinds.unmaskable:
        return f"layers of kind {', '.join(engine.policy.kinds.unmaskable)}"
    tokens = TokenRows(*_ragged(rows.prompts), *_ragged(rows.responses))
    units = units_of(range(len(rows.groups)), torch.tensor(rows.groups), optim.share_prompts)
    plan = engine.plan(tokens, units)[engine.settings.rank]
    try:
        scores = engine.logprobs(tokens, plan, temperature=1.0, training=True)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if not optim.share_prompts:
            raise
        return f"{type(error).__name__}: {error}"  # a model that takes no mask of this form fails as it likes
    return {row: logprobs.numpy() for row, (logprobs, _) in scores.items()}


def probe_logprobs(engine: Zero3Engine, tokens: TokenRows, groups: Tensor) -> dict[int, np.ndarray]:
    """All rows, on every rank, in the units of an update: row -> logprobs at temperature 1; collective."""
    units = units_of(range(len(groups)), groups, engine.settings.optim.share_prompts)
    plan = engine.plan(tokens, units)
    everything = [microbatch for rank in plan for microbatch in rank if microbatch]
    scores = engine.logprobs(tokens, everything, temperature=1.0)
    return {row: logprobs.numpy() for row, (logprobs, _) in scores.items()}


def _ragged(rows: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    values = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
