"""Chat messages of a row, in the forms that data sets have, as the one form that chat templates take.

{"role": "user", "content": "2 + 2?"}
{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}       text parts are joined
{"from": "human", "value": "2 + 2?"}                                    ShareGPT
{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}
{"role": "tool", "content": "4", "tool_call_id": "1"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf_core.errors import PromptError
from rlhf_core.prompts.values import json_value, short

#: Roles that chat templates know. A misspelled role would otherwise end up in the text the model sees.
ROLES = ("system", "developer", "user", "assistant", "tool")

#: What a message may have beside role and content.
EXTRAS = ("name", "reasoning_content", "tool_calls", "tool_call_id")

#: Who speaks in ShareGPT's form -> role.
_SENDERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}

Message = dict[str, Any]


def read_conversation(value: Any, where: str) -> tuple[str, tuple[Message, ...]]:
    """The prompt's text (the string, or the last user message) and its messages; none for a plain string.

    PromptError for what is no conversation that an assistant could go on with.
    """
    if isinstance(value, str):
        if not value.strip():
            raise PromptError(f"{where}: the prompt is empty: drop the row or fill it in")
        return value, ()
    if not isinstance(value, list):
        raise PromptError(
            f"{where}: a prompt is a string or a list of chat messages, not {type(value).__name__} ({short(value)})"
        )
    messages = tuple(_message(item, f"{where}, message {n}") for n, item in enumerate(value, start=1))
    asked = [m["content"] for m in messages if m["role"] == "user"]
    if not asked:
        raise PromptError(f"{where}: no message with the role 'user' ({short(value)}): a prompt needs one")
    if messages[-1]["role"] == "assistant":
        raise PromptError(f"{where}: the last message is from the assistant: end the prompt before the answer")
    return asked[-1], messages


def read_tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Descriptions of tools: a list of objects, or that list as JSON text; none for an empty value. PromptError for others."""
    if not value:
        return ()
    tools = _objects(value, where)
    if tools is None:
        raise PromptError(
            f"{where}: tools are a list of objects, not {short(value)}; if the column is about something else, set "
            'prompts.tools_column to another one, or to ""'
        )
    return tuple(tools)


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise PromptError(f"{where}: a message is an object with 'role' and 'content', not {short(item)}")
    given = {str(key): value for key, value in item.items() if not _is_empty(value)}
    if "role" not in given and "from" in given:
        given = _from_sharegpt(given, where)
    role = given.pop("role", None)
    content = given.pop("content", None)
    if role not in ROLES:
        raise PromptError(f"{where}: role = {short(role)}; roles are {', '.join(ROLES)}")
    unknown = sorted(given.keys() - set(EXTRAS))
    if unknown:
        raise PromptError(
            f"{where}: unknown key {unknown[0]!r}: a message has 'role', 'content' and perhaps {', '.join(EXTRAS)}"
        )
    message: Message = {"role": role, "content": _text(content, where)}
    if "tool_calls" in given:
        message["tool_calls"] = _tool_calls(given.pop("tool_calls"), role, where)
    for key, value in given.items():
        if not isinstance(value, str):
            raise PromptError(f"{where}: {key} is {type(value).__name__} ({short(value)}), not a string")
        message[key] = value
    if not message["content"].strip() and role != "tool" and "tool_calls" not in message:
        raise PromptError(f"{where}: the content is empty: drop the message or fill it in")
    return message


def _is_empty(value: Any) -> bool:
    """Null or of no length: tables give every message the keys that any message has."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def _from_sharegpt(given: Message, where: str) -> Message:
    sender = given.pop("from")
    if not isinstance(sender, str) or sender not in _SENDERS:
        raise PromptError(
            f"{where}: from = {short(sender)}; known are {', '.join(_SENDERS)}: write the message with 'role' and "
            "'content'"
        )
    return {"role": _SENDERS[sender], "content": given.pop("value", None), **given}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, f"{where}, part {n}") for n, part in enumerate(content, start=1))
    raise PromptError(f"{where}: content is {type(content).__name__} ({short(content)}), not text or a list of parts")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise PromptError(
        f"{where}: only parts of the type 'text' can be used, not {short(part)}: drop the row or the part"
    )


def _tool_calls(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    calls = _objects(value, where)
    if role != "assistant" or calls is None:
        raise PromptError(
            f"{where}: 'tool_calls' ({short(value)}) are a list of objects in a message of the assistant, not of {role!r}"
        )
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            # Templates write the arguments as JSON themselves; a string would be quoted once more.
            function["arguments"] = _parsed(function["arguments"])
    return calls


def _objects(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The list of objects, without nulls: tables give every object the keys that any has. None if it is no such list."""
    found = json_value(_parsed(value) if isinstance(value, str) else value, where)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        return None
    return [_without_nulls(item) for item in found]


def _parsed(text: str) -> Any:
    """The value of a JSON text, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
