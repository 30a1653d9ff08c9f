"""Whether tokenizer and model belong together, seen before either serves or trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ModelError
from rlhf_core.models.tokenizer import chat_tokenizer, text_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

#: Stands for a response in a rendered conversation: no template has it.
_RESPONSE = "An answer, 7531."


def check_vocabulary(prompts: pa.Table, folder: str | Path, vocab_size: int) -> None:
    """ModelError if a tokenized prompt has a token that the model of the folder does not know.

    ``prompts``: the table of ``tokenize_prompts``. ``vocab_size``: the model knows the token ids below it.
    """
    import pyarrow.compute as pc

    ids = prompts["prompt_ids"]
    largest = pc.max(pc.list_flatten(ids)).as_py()
    if largest is None or largest < vocab_size:
        return
    row = next(row for row, tokens in enumerate(ids.to_pylist()) if largest in tokens)
    raise ModelError(
        f"model folder {str(folder)!r}: prompt {prompts['prompt_id'][row].as_py()} (number {row + 1}) has token {largest} "
        f"({text_tokenizer(folder).id_to_token(largest)!r}), but the model knows the token ids 0 to {vocab_size - 1}: its "
        "tokenizer is larger than the model. Use the tokenizer that the model was trained with, or enlarge the model: "
        "model.resize_token_embeddings(len(tokenizer)), then save_pretrained"
    )


def unended_turn(
    folder: str | Path, end_ids: Collection[int], variables: Mapping[str, Any] | None = None
) -> tuple[int, str] | None:
    """Id and text of the token with which the chat template ends a response, if it is none of the model's end tokens; else None.

    None too where the template ends responses with ordinary text, or cannot render a conversation of two turns.
    ``variables``: those of the template.
    """
    tokenizer = chat_tokenizer(folder)
    turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _RESPONSE}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, **(variables or {}))
    except Exception:  # noqa: BLE001  # boundary: a template may fail in any way on turns that no prompt has
        return None
    after = text.rpartition(_RESPONSE)[2] if _RESPONSE in text else ""
    tokens = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    if not tokens or tokens[0] not in special or tokens[0] in {*end_ids, tokenizer.eos_token_id}:
        return None
    return tokens[0], tokenizer.convert_ids_to_tokens(tokens[0])
