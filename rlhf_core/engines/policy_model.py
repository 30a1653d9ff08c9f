"""A causal language model that answers with logprobs of the response tokens instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.engines.attention import as_added, attention_for, layer_kinds
from rlhf_core.engines.head import LogprobHead
from rlhf_core.engines.rows import Batch


class PolicyModel(nn.Module):
    """Wraps a Hugging Face causal model; parameters keep their names below ``model.``."""

    def __init__(self, model: Any) -> None:
        """ModelError if the model's output layer is of an unknown kind."""
        super().__init__()
        self.model = model
        self.head = LogprobHead(model)
        self.kinds = layer_kinds(model.config)

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs (after temperature) and entropies of the response tokens, float32 [R], row after row.

        ValueError where samples share a prompt and the model has layers that would let them see each other.
        """
        states = self.model.base_model(
            input_ids=batch.input_ids_BT,
            position_ids=batch.position_ids_BT,
            attention_mask=self._masks(batch),
            use_cache=False,
        ).last_hidden_state
        return self.head(states.flatten(0, 1)[batch.states_R], batch.targets_R, temperature)

    def _masks(self, batch: Batch) -> Tensor | dict[str, Tensor] | None:
        if batch.mask_B1TT is None:
            return None
        if self.kinds.unmaskable:
            raise ValueError(
                f"{type(self.model).__name__} has layers of kind {', '.join(self.kinds.unmaskable)}, which no mask keeps apart"
            )
        masks = self.kinds.masks(batch.mask_B1TT, batch.position_ids_BT)
        if self.model.config.get_text_config()._attn_implementation != "eager":
            return masks
        dtype = self.model.dtype
        if isinstance(masks, Tensor):
            return as_added(masks, dtype)
        return {name: as_added(mask, dtype) for name, mask in masks.items()}


def load_policy(folder: str, dtype: str, gradient_checkpointing: bool) -> PolicyModel:
    """Load a Hugging Face folder for training. Dropout is off: policy and old policy must be the same function."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    for key, value in config.to_dict().items():  # layers read their dropout, routers their noise from here
        if ("dropout" in key or key.endswith("pdrop") or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention_for(config)}
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
    """Name of a parameter of ``PolicyModel`` in the transformers model."""
    return name.removeprefix("model.")
