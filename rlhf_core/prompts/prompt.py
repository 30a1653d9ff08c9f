"""One prompt, and how a row of a data set becomes one. Every bad row is a PromptError that says where it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from rlhf_core.errors import PromptError
from rlhf_core.prompts.messages import read_conversation, read_tools
from rlhf_core.prompts.values import answer_text, column_names, columns_found, find_value, json_value


@dataclass(frozen=True)
class Prompt:
    """A prompt with what its reward needs."""

    prompt_id: str
    """Hex digest of the content; repeated prompts get `-2`, `-3`, ... in the order of the source."""
    text: str
    """The prompt as the user gave it: the string, or the last user message."""
    messages: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """Chat messages (`role`, `content`, perhaps tool calls); empty if the source had a plain string."""
    answer: str | None = None
    """Reference answer for the reward."""
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    """The other columns, as JSON values."""
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """Descriptions of tools for the chat template."""


@dataclass(frozen=True)
class Row:
    """A row as read, with its place for error messages."""

    place: str
    """`line 3` or `row 3`, counted from 1; with the file in front where there are several."""
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """Which columns hold what. `a.b` is the key `b` of the objects in column `a`."""

    prompt: str = "prompt"
    answer: str = "answer"
    answer_required: bool = False
    """Whether it is an error that no row has the answer's column."""
    tools: str = "tools"


def content_digest(
    text: str, messages: Iterable[Mapping[str, Any]] = (), tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """16 hex digits of the blake3 of the conversation. A plain string equals one user message of that string.

    Answer and metadata do not count: the same question is the same prompt. UnicodeEncodeError for a lone surrogate.
    """
    turns: list[Any] = []
    for message in messages or [{"role": "user", "content": text}]:
        extras = {key: value for key, value in message.items() if key not in ("role", "content")}
        turns.append([message["role"], message["content"], *([extras] if extras else [])])
    if tools:
        turns.append(list(tools))
    return blake3(json.dumps(turns, ensure_ascii=False, sort_keys=True).encode("utf-8")).hexdigest(length=8)


def build_prompts(rows: Iterable[Row], columns: Columns, origin: str) -> list[Prompt]:
    """Check every row and turn it into a Prompt, in order. PromptError names ``origin`` and the bad row's place."""
    seen: Counter[str] = Counter()
    prompts: list[Prompt] = []
    names: dict[str, None] = {}
    answered = False
    for row in rows:
        where = f"prompts.source = {origin!r}, {row.place}"
        try:
            prompt, has_answer = _prompt(row, columns, where)
        except RecursionError:
            raise PromptError(f"{where}: values are nested too deeply: store them as text, or drop the row") from None
        seen[prompt.prompt_id] += 1
        times = seen[prompt.prompt_id]
        prompts.append(prompt if times == 1 else _repeated(prompt, times))
        answered = answered or has_answer
        if not answered:
            names.update(dict.fromkeys(column_names(row.values)))
    if not prompts:
        raise PromptError(f"prompts.source = {origin!r} has no rows: give it at least one prompt")
    if columns.answer_required and not answered:
        raise PromptError(
            f"prompts.answer_column = {columns.answer!r}: no row of prompts.source = {origin!r} has such a column; "
            f"{columns_found(columns.answer, list(names))}"
        )
    return prompts


def _prompt(row: Row, columns: Columns, where: str) -> tuple[Prompt, bool]:
    """The prompt with the digest of its content as id, and whether the row has the answer's column."""
    present, value = find_value(row.values, columns.prompt)
    if not present:
        raise PromptError(
            f"{where}: no column {columns.prompt!r}; {columns_found(columns.prompt, list(column_names(row.values)))}. "
            "Set prompts.prompt_column to the one that holds the prompt"
        )
    text, messages = read_conversation(value, f"{where}, column {columns.prompt!r}")
    answered, value = find_value(row.values, columns.answer)
    answer = answer_text(value, f"{where}, column {columns.answer!r}")
    tools = read_tools(row.values.get(columns.tools), f"{where}, column {columns.tools!r}")
    others = {k: v for k, v in row.values.items() if k not in (columns.prompt, columns.answer)}
    metadata = {str(k): json_value(v, f"{where}, column {k!r}") for k, v in others.items()}
    try:
        digest = content_digest(text, messages, tools)
        json.dumps([answer, metadata], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: text that is not valid Unicode ({error.reason}): repair or drop the row") from None
    return Prompt(digest, text, messages, answer, metadata, tools), answered


def _repeated(prompt: Prompt, times: int) -> Prompt:
    return Prompt(
        f"{prompt.prompt_id}-{times}", prompt.text, prompt.messages, prompt.answer, prompt.metadata, prompt.tools
    )
