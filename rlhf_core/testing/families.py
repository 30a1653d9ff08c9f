"""Tiny random models of many families, without tokenizers: what differs between them is what a trainer may get wrong.

Weights and scales are chosen so that a fault shows: where a model bends its logits, they are large enough to be bent; windows are
shorter than the rows that tests use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Tokens that every family knows.
VOCABULARY = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}

#: Name -> (transformers' model type, what differs from ``_SIZES``).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "gemma2": ("gemma2", {**_MIXED, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gemma2-softcaps": (
        "gemma2",
        {**_MIXED, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 1},
    ),
    "gemma3": ("gemma3_text", dict(_MIXED)),
    "phi-bias": ("phi", {"num_key_value_heads": 2}),
    "phi3-window": ("phi3", {"sliding_window": 8, "original_max_position_embeddings": 256}),
    "granite": (
        "granite",
        {"logits_scaling": 0.25, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    ),
    "cohere": ("cohere", {"logit_scale": 4.0}),
    "olmo2": ("olmo2", {}),
    "falcon-h1": (
        "falcon_h1",
        {"lm_head_multiplier": 4.0, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, **_EXPERTS,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, **_EXPERTS},
    ),
}  # fmt: skip


def make_family(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Write the random model of this family, float32. The same arguments give the same bytes; the caller's random state stays."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, differences = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **differences})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                # Initial weights are so small that every layer does next to nothing; a bias starts at 0.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return Path(folder)
