"""The plain transformers model, as a measure for trainer and engine: loaded by itself, one row at a time."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlhf_core.algorithms.parity import PlainLogprobs
from rlhf_core.engines.heap import trim_heap

#: Memory per parameter, in bytes, while the model goes from its own type to float32.
_BYTES = 5


def plain_logprobs(
    folder: str, dtype: str, device: torch.device, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> PlainLogprobs | None:
    """``AutoModelForCausalLM`` with eager attention on each row. None if a second copy of the model does not fit the memory.

    Eager attention is the one that knows everything that a configuration can say, soft caps included.
    """
    from transformers import AutoModelForCausalLM

    options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    needed = _BYTES * sum(p.numel() for p in model.parameters())
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed:
        device = torch.device("cpu")
    if device.type == "cpu" and _host_memory() < needed:
        return None
    model.to(device)
    own = _rows(model, device, prompts, responses)
    exact = own if dtype == "float32" else _rows(model.float(), device, prompts, responses)
    del model
    gc.collect()
    trim_heap()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return PlainLogprobs(own, exact)


@torch.no_grad()
def _rows(
    model: Any, device: torch.device, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([[*prompt, *response]], device=device)
        keep = {"logits_to_keep": len(response) + 1} if fewer else {}
        logits = model(input_ids=ids, use_cache=False, **keep).logits[0, -len(response) - 1 : -1]
        targets = ids[0, len(prompt) :].unsqueeze(1)
        rows.append(logits.float().log_softmax(-1).gather(1, targets).squeeze(1).cpu().numpy())
    return rows


def _host_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
