"""A causal language model that answers with logprobs of the response tokens instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.algorithms.logprobs import chunked_head_logprobs
from rlhf_core.engines.rows import Batch


class LogprobHead(nn.Module):
    """The output layer. It owns the (possibly tied) weight, so that ZeRO-3 gathers it once for all chunks."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_RD: Tensor, targets_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies, float32 [R]."""
        return chunked_head_logprobs(hidden_RD, lambda h: nn.functional.linear(h, self.weight), targets_R, temperature)


class PolicyModel(nn.Module):
    """Wraps a Hugging Face causal model; parameters keep their names below ``model.``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ValueError("a model whose output layer has a bias is not supported")
        self.model = model
        self.head = LogprobHead(head.weight)

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs (after temperature) and entropies of the response tokens, float32 [R], row after row."""
        states = self.model.base_model(
            input_ids=batch.input_ids_BT,
            position_ids=batch.position_ids_BT,
            attention_mask=batch.mask_B1TT,
            use_cache=False,
        ).last_hidden_state
        return self.head(states.flatten(0, 1)[batch.states_R], batch.targets_R, temperature)


def load_policy(folder: str, dtype: str, gradient_checkpointing: bool) -> PolicyModel:
    """Load a Hugging Face folder for training. Dropout is off: policy and old policy must be the same function."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    for key, value in config.to_dict().items():  # attention reads its dropout from here
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(model)
    policy.train()
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return policy


def exported_name(name: str) -> str:
    """Name of a parameter of ``PolicyModel`` in the Hugging Face checkpoint."""
    return name.removeprefix("model.")
