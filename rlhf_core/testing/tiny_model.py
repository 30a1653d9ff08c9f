"""A small random Llama with a real tokenizer, for tests that need an engine or a trainer but no skill."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.models.smollm2 import smollm2_tokenizer


def tiny_tokenizer_folder(cache: str | Path) -> Path:
    """Folder with SmolLM2's tokenizer and chat template only (cached). ModelError: package missing."""
    return smollm2_tokenizer(cache)


def byte_tokenizer_folder(folder: str | Path) -> Path:
    """Write a tokenizer whose tokens are the bytes: a model with it computes 200 times fewer logits. 258 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = (
        "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
    )
    wrapped.save_pretrained(folder)
    return Path(folder)


def make_tiny_model(
    folder: str | Path,
    tokenizer_from: str | Path,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 2,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Write a random Llama (head_dim 64, tied embeddings, context 1024) with the tokenizer of ``tokenizer_from``.

    The same arguments give the same bytes; the caller's random state is untouched. With the defaults and SmolLM2's
    vocabulary it has about 6.6 M parameters.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_from), local_files_only=True)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
