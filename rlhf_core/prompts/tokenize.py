"""Prompts as token ids: the chat template of the model applied once, before any engine starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import PromptError
from rlhf_core.models.tokenizer import chat_tokenizer
from rlhf_core.prompts.prompt import Prompt

if TYPE_CHECKING:
    import pyarrow as pa

#: Prompts rendered and encoded at once: bounds memory, and keeps the tokenizer's threads busy.
_CHUNK = 4096


def tokenize_prompts(
    prompts: Sequence[Prompt],
    model_folder: str | Path,
    *,
    system: str | None,
    max_prompt_tokens: int | None,
    context: int,
    max_new_tokens: int,
) -> pa.Table:
    """Apply the chat template (with the generation prompt) and encode, in order.

    A plain string becomes one user message; ``system`` is put before every conversation that does not start with a
    system message. ``context`` is the model's context length; a prompt may have ``context - max_new_tokens`` tokens,
    or ``max_prompt_tokens`` if that is less.

    Columns: ``prompt_id`` string, ``prompt_text`` string (as the user gave it), ``prompt_ids`` list<int32>,
    ``answer`` string (null: none), ``metadata`` string (JSON object).

    PromptError: a prompt over the limit, or refused by the template. ModelError: no usable tokenizer or no template.
    """
    import pyarrow as pa

    limit, reason = _limit(max_prompt_tokens, context, max_new_tokens)
    tokenizer = chat_tokenizer(model_folder)
    ids: list[Any] = []
    lengths: list[int] = []
    for texts in _rendered(tokenizer, [_messages(p, system) for p in prompts], prompts):
        # The template already wrote the special tokens.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        lengths.extend(len(row) for row in encoded)
        ids.append(pa.array(encoded, type=pa.list_(pa.int32())))
    _check_lengths(prompts, lengths, limit, reason)
    return pa.table(
        {
            "prompt_id": pa.array([p.prompt_id for p in prompts], pa.string()),
            "prompt_text": pa.array([p.text for p in prompts], pa.string()),
            "prompt_ids": pa.chunked_array(ids, pa.list_(pa.int32())).combine_chunks(),
            "answer": pa.array([p.answer for p in prompts], pa.string()),
            "metadata": pa.array([_json(p.metadata) for p in prompts], pa.string()),
        }
    )


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


def _messages(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    if system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _rendered(
    tokenizer: Any, conversations: list[list[dict[str, str]]], prompts: Sequence[Prompt]
) -> Iterator[list[str]]:
    from jinja2.exceptions import TemplateError

    def render(chunk: Any) -> Any:
        return tokenizer.apply_chat_template(chunk, tokenize=False, add_generation_prompt=True)

    for start in range(0, len(conversations), _CHUNK):
        chunk = conversations[start : start + _CHUNK]
        try:
            yield render(chunk)
        except TemplateError:
            # Once more one by one, to name the prompt; templates refuse roles or an order of roles by raising.
            for row, conversation in enumerate(chunk, start=start):
                try:
                    render(conversation)
                except TemplateError as error:
                    roles = ", ".join(m["role"] for m in conversation)
                    raise PromptError(
                        f"prompt {prompts[row].prompt_id} (number {row + 1}): the model's chat template refuses it: "
                        f"{error} (roles: {roles}). Change the prompt, prompts.system, or the model"
                    ) from error
            raise


def _check_lengths(prompts: Sequence[Prompt], lengths: Sequence[int], limit: int, reason: str) -> None:
    long = [row for row, length in enumerate(lengths) if length > limit]
    if long:
        row = max(long, key=lambda r: lengths[r])
        others = (
            f"; {len(long)} of {len(prompts)} prompts are too long, this one is the longest" if len(long) > 1 else ""
        )
        raise PromptError(
            f"prompt {prompts[row].prompt_id} (number {row + 1}) has {lengths[row]} tokens, but the limit is {limit} "
            f"({reason}){others}. Shorten or drop it, or change the limit. It starts with {prompts[row].text[:60]!r}"
        )


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, ensure_ascii=False, sort_keys=True, allow_nan=False)
