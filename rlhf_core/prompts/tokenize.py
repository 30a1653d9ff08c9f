"""Prompts as token ids: the chat template of the model applied once, before any engine starts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import PromptError
from rlhf_core.models.tokenizer import chat_tokenizer
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.template import render_prompts

if TYPE_CHECKING:
    import pyarrow as pa

#: Prompts encoded at once: bounds memory, and keeps the tokenizer's threads busy.
_CHUNK = 4096


class TokenizedPrompts(NamedTuple):
    """The prompts of a source as token ids."""

    kept: pa.Table
    """``prompt_id`` string, ``prompt_text`` string (as the user gave it), ``prompt_ids`` list<int32>, ``answer`` string
    (null: none), ``metadata`` string (JSON object)."""
    dropped: pa.Table
    """Those over the limit: ``prompt_id``, ``prompt_text``, ``tokens`` int32 (their number)."""


def tokenize_prompts(
    prompts: Sequence[Prompt], model_folder: str | Path, config: PromptsConfig, *, context: int, max_new_tokens: int
) -> TokenizedPrompts:
    """Apply the chat template (with the generation prompt) and encode, in order.

    A plain string becomes one user message; ``config.system`` is put before every conversation that does not start with
    a system message. ``context`` is the model's context length; a prompt may have ``context - max_new_tokens`` tokens,
    or ``config.max_prompt_tokens`` if that is less. What is longer is dropped where ``config.too_long`` says so.

    PromptError: a prompt over the limit, no prompt within it, or one refused by the template. ConfigError: a variable that
    the template does not use. ModelError: no usable tokenizer or no template.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    limit, reason = _limit(config.max_prompt_tokens, context, max_new_tokens)
    tokenizer = chat_tokenizer(model_folder)
    texts = render_prompts(tokenizer, prompts, config.system, config.template)
    ids: list[Any] = []
    lengths: list[int] = []
    while chunk := list(itertools.islice(texts, _CHUNK)):
        # The template already wrote the special tokens.
        encoded = tokenizer(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        lengths.extend(len(row) for row in encoded)
        ids.append(pa.array(encoded, type=pa.list_(pa.int32())))
    table = pa.table(
        {
            "prompt_id": pa.array([p.prompt_id for p in prompts], pa.string()),
            "prompt_text": pa.array([p.text for p in prompts], pa.string()),
            "prompt_ids": pa.chunked_array(ids, pa.list_(pa.int32())).combine_chunks(),
            "answer": pa.array([p.answer for p in prompts], pa.string()),
            "metadata": pa.array([_json(p.metadata) for p in prompts], pa.string()),
        }
    )
    tokens = pa.array(lengths, pa.int32())
    fits = pa.array([length <= limit for length in lengths], pa.bool_())
    if config.too_long == "refuse" or not any(fits.to_pylist()):
        _check_lengths(prompts, lengths, limit, reason)
    dropped = table.select(["prompt_id", "prompt_text"]).append_column("tokens", tokens).filter(pc.invert(fits))
    return TokenizedPrompts(table.filter(fits), dropped)


def _limit(max_prompt_tokens: int | None, context: int, max_new_tokens: int) -> tuple[int, str]:
    room = context - max_new_tokens
    if room < 1:
        raise PromptError(
            f"generate.max_new_tokens = {max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{context} tokens: lower it"
        )
    if max_prompt_tokens is not None and max_prompt_tokens <= room:
        return max_prompt_tokens, f"prompts.max_prompt_tokens = {max_prompt_tokens}"
    return room, f"the model's context {context} - generate.max_new_tokens {max_new_tokens}"


def _check_lengths(prompts: Sequence[Prompt], lengths: Sequence[int], limit: int, reason: str) -> None:
    long = [row for row, length in enumerate(lengths) if length > limit]
    if long:
        row = max(long, key=lambda r: lengths[r])
        others = (
            f"; {len(long)} of {len(prompts)} prompts are too long, this one is the longest" if len(long) > 1 else ""
        )
        raise PromptError(
            f"prompt {prompts[row].prompt_id} (number {row + 1}) has {lengths[row]} tokens, but the limit is {limit} "
            f"({reason}){others}. Shorten or drop it, change the limit, or leave out what is too long with "
            f"prompts.too_long = 'drop'. It starts with {prompts[row].text[:60]!r}"
        )


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, ensure_ascii=False, sort_keys=True, allow_nan=False)
