"""Logprobs and entropy of tokens from hidden states, with bounded memory.

Shapes: N token positions, n those of one chunk, D hidden size, V vocabulary.

Rows are handled in chunks. With gradients on, a chunk keeps only its hidden states and is computed again in the backward
pass, so the logits and their float32 copies exist for one chunk only.
The chunk size changes no row beyond rounding: each row is reduced over V on its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_core.algorithms.masked import at_least_float32

#: Rows of one chunk: 512 rows of 150k float32 logits are 0.3 GB.
CHUNK_ROWS = 512


def chunked_head_logprobs(
    hidden_ND: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float = 1.0,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature) at the targets, and the entropy of that distribution, without ever holding
    [N, V] logits.

    The head runs max(1, ceil(N / chunk_rows)) times, and as often again in the backward pass. If calling it starts
    collectives (partitioned parameters), either gather its weight once around this call and the backward pass, or give
    every rank the same number of chunks.

    Args:
        hidden_ND: [N, D].
        head: maps [n, D] to logits [n, V] row by row, any float dtype; its parameters get gradients. -inf marks tokens
            that cannot be drawn.
        targets_N: [N] int64 token ids.
        temperature: the sampling temperature, > 0.
        chunk_rows: rows handled at once.

    Returns:
        logprobs_N and entropy_N (in nats): [N] float32 (float64 for float64 logits), with gradient to hidden states and head.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: logprobs need a temperature above 0")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows = {chunk_rows}: a chunk has at least one row")
    if targets_N.shape != hidden_ND.shape[:-1]:
        raise ValueError(
            f"targets have shape {tuple(targets_N.shape)}, there are {tuple(hidden_ND.shape[:-1])} hidden states"
        )

    def score(hidden_nD: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        return _score(head(hidden_nD), targets_n, temperature)

    # split is one node of the graph: slices would each build a zero gradient of the full input in the backward pass.
    chunks = zip(hidden_ND.split(chunk_rows), targets_N.split(chunk_rows), strict=True)
    if torch.is_grad_enabled():
        # Nothing here draws random numbers, so their state need not be kept.
        parts = [
            checkpoint(score, hidden, targets, use_reentrant=False, preserve_rng_state=False)
            for hidden, targets in chunks
        ]
    else:
        parts = [score(hidden, targets) for hidden, targets in chunks]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _score(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_NV = (at_least_float32(logits_NV) / temperature).log_softmax(dim=-1)
    logprobs_N = logp_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    # -sum(p log p) has terms of one sign; logsumexp(z) - sum(p z) would lose the digits of small entropies.
    # A finite floor: 0 * -inf would be NaN for tokens that cannot be drawn.
    entropy_N = -(logp_NV.exp() * logp_NV.clamp(min=torch.finfo(logp_NV.dtype).min)).sum(dim=-1)
    return logprobs_N, entropy_N
