"""The tokenizer of a model folder: for prompts, with its chat template, and for workers, which turn token ids into text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.errors import ModelError


def chat_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of transformers. ModelError if its files cannot be used or have no chat template."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # boundary: tokenizer files fail in as many ways as there are formats
        raise ModelError(
            f"model.source: the tokenizer in {str(folder)!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"model.source: the tokenizer in {str(folder)!r} has no chat template, so prompts cannot be put into "
            "the form that the model was trained on: use an instruction-tuned model, or add chat_template.jinja to the "
            "folder"
        )
    if not tokenizer.is_fast:
        raise ModelError(
            f"model.source: the tokenizer in {str(folder)!r} is a {type(tokenizer).__name__}, which has no fast form "
            "(tokenizer.json): save one into the folder"
        )
    return tokenizer


def text_tokenizer(folder: str | Path) -> Any:
    """A ``tokenizers.Tokenizer``: read from tokenizer.json, or converted from older files as transformers and vLLM do.

    ModelError as in ``chat_tokenizer``.
    """
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return chat_tokenizer(folder).backend_tokenizer
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # boundary: the library raises nothing more special
        raise ModelError(f"model folder {str(folder)!r}: tokenizer.json cannot be read: {error}") from error
