"""Values of a row: answers as text, metadata as JSON, and columns inside columns."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from rlhf_core.errors import PromptError

#: Levels below a column that are looked at for the names in a message.
_LEVELS = 3


def find_value(values: Mapping[str, Any], column: str) -> tuple[bool, Any]:
    """Whether the row has the column, and its value.

    A column of this very name goes first; otherwise `a.b` is the key `b` of the object in column `a`.
    """
    if column in values:
        return True, values[column]
    found: Any = values
    for part in column.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False, None
        found = found[part]
    return True, found


def column_names(values: Mapping[str, Any], levels: int = _LEVELS) -> Iterator[str]:
    """The columns of a row, each followed by those inside it, as `a.b`."""
    for key, value in values.items():
        yield str(key)
        if isinstance(value, Mapping) and levels:
            yield from (f"{key}.{inner}" for inner in column_names(value, levels - 1))


def columns_found(column: str, names: list[str]) -> str:
    """For a message about a column that is not there: those that are, and the one that may be meant."""
    near = get_close_matches(column, names, n=1) or [name for name in names if name.endswith(f".{column}")]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"columns found: {', '.join(map(repr, names)) or 'none'}{hint}"


def answer_text(value: Any, where: str) -> str | None:
    """The answer as a reward gets it: text as it is, numbers in digits, lists, objects and booleans as JSON text.

    None for null and for NaN, which is how tables from pandas spell a missing number. PromptError for anything else.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool | Mapping | list | tuple):
        return json.dumps(json_value(value, where), ensure_ascii=False)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return _decimal_text(value)
    raise PromptError(
        f"{where}: {type(value).__name__} ({short(value)}) cannot be an answer: store it as text, or name another "
        "column in prompts.answer_column"
    )


def _decimal_text(value: float | Decimal) -> str:
    """Without exponent, and without the '.0' that tables give to whole numbers in a column with gaps."""
    if value == int(value):
        return str(int(value))
    return format(value if isinstance(value, Decimal) else Decimal(repr(value)), "f")


def json_value(value: Any, where: str) -> Any:
    """The value as JSON: dates as ISO text, decimals as text, NaN and infinities as null. PromptError for bytes and such."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): json_value(v, where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(v, where) for v in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | Decimal):
        return str(value)
    raise PromptError(f"{where}: {type(value).__name__} cannot be kept as JSON: drop the column or store it as text")


def short(value: Any) -> str:
    """The value for a message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
