"""One prompt, and how a row of a data set becomes one. Every bad row is a PromptError that says where it is."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from blake3 import blake3

from rlhf_core.errors import PromptError

#: Roles that chat templates know. A misspelled role would otherwise end up in the text the model sees.
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """A prompt with what its reward needs."""

    prompt_id: str
    """Hex digest of the content; repeated prompts get `-2`, `-3`, ... in the order of the source."""
    text: str
    """The prompt as the user gave it: the string, or the last user message."""
    messages: tuple[dict[str, str], ...] = field(default=(), hash=False)
    """Chat messages (`role`, `content`); empty if the source had a plain string."""
    answer: str | None = None
    """Reference answer for the reward."""
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    """The other columns, as JSON values."""


@dataclass(frozen=True)
class Row:
    """A row as read, with its place for error messages."""

    place: str
    """`line 3` or `row 3`, counted from 1."""
    values: Mapping[str, Any]


def content_digest(text: str, messages: Iterable[Mapping[str, str]] = ()) -> str:
    """16 hex digits of the blake3 of the conversation. A plain string equals one user message of that string.

    Answer and metadata do not count: the same question is the same prompt. UnicodeEncodeError for a lone surrogate.
    """
    turns = [[m["role"], m["content"]] for m in messages] or [["user", text]]
    return blake3(json.dumps(turns, ensure_ascii=False).encode("utf-8")).hexdigest(length=8)


def build_prompts(rows: Iterable[Row], prompt_column: str, answer_column: str, origin: str) -> list[Prompt]:
    """Check every row and turn it into a Prompt, in order. PromptError names ``origin`` and the bad row's place."""
    seen: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for row in rows:
        where = f"prompts.source = {origin!r}, {row.place}"
        if prompt_column not in row.values:
            raise PromptError(
                f"{where}: no column {prompt_column!r}; columns found: {', '.join(map(repr, row.values)) or 'none'}. "
                "Set prompts.prompt_column to the one that holds the prompt"
            )
        text, messages = _conversation(row.values[prompt_column], f"{where}, column {prompt_column!r}")
        answer = _answer(row.values.get(answer_column), f"{where}, column {answer_column!r}")
        others = {k: v for k, v in row.values.items() if k not in (prompt_column, answer_column)}
        metadata = {str(k): _json_value(v, f"{where}, column {k!r}") for k, v in others.items()}
        try:
            digest = content_digest(text, messages)
            json.dumps([answer, metadata], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{where}: text that is not valid Unicode ({error.reason}): repair or drop the row"
            ) from None
        seen[digest] += 1
        prompt_id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        prompts.append(Prompt(prompt_id, text, messages, answer, metadata))
    if not prompts:
        raise PromptError(f"prompts.source = {origin!r} has no rows: give it at least one prompt")
    return prompts


def _conversation(value: Any, where: str) -> tuple[str, tuple[dict[str, str], ...]]:
    if isinstance(value, str):
        if not value.strip():
            raise PromptError(f"{where}: the prompt is empty: drop the row or fill it in")
        return value, ()
    if not isinstance(value, list):
        raise PromptError(
            f"{where}: a prompt is a string or a list of chat messages, not {type(value).__name__} ({_short(value)})"
        )
    messages = tuple(_message(item, f"{where}, message {n}") for n, item in enumerate(value, start=1))
    asked = [m["content"] for m in messages if m["role"] == "user"]
    if not asked:
        raise PromptError(f"{where}: no message with the role 'user' ({_short(value)}): a prompt needs one")
    if messages[-1]["role"] == "assistant":
        raise PromptError(f"{where}: the last message is from the assistant: end the prompt before the answer")
    return asked[-1], messages


def _message(item: Any, where: str) -> dict[str, str]:
    if not isinstance(item, Mapping):
        raise PromptError(f"{where}: a message is an object with 'role' and 'content', not {_short(item)}")
    extra = sorted(str(k) for k, v in item.items() if k not in ("role", "content") and v is not None)
    if extra:
        raise PromptError(f"{where}: unknown key {extra[0]!r}: a message has 'role' and 'content' only")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise PromptError(f"{where}: role = {_short(role)}; roles are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise PromptError(f"{where}: content is {type(content).__name__} ({_short(content)}), not a string")
    if not content.strip():
        raise PromptError(f"{where}: the content is empty: drop the message or fill it in")
    return {"role": role, "content": content}


def _answer(value: Any, where: str) -> str | None:
    if isinstance(value, float) and math.isnan(value):
        return None  # how tables from pandas spell a missing number
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        return _decimal_text(value)
    raise PromptError(f"{where}: an answer is a string or a number, not {type(value).__name__} ({_short(value)})")


def _decimal_text(value: int | float | Decimal) -> str:
    """Without exponent, and without the '.0' that tables give to whole numbers in a column with gaps."""
    if value == int(value):
        return str(int(value))
    return format(value if isinstance(value, Decimal) else Decimal(repr(value)), "f")


def _json_value(value: Any, where: str) -> Any:
    """The value as JSON: dates as ISO text, decimals as text, NaN and infinities as null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _json_value(v, where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v, where) for v in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | Decimal):
        return str(value)
    raise PromptError(
        f"{where}: {type(value).__name__} cannot be kept as metadata: drop the column or store it as text"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
