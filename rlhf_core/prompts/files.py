"""Rows of one file: JSON Lines, a JSON array, Parquet. What cannot be read is a PromptError that says where."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlhf_core.errors import PromptError
from rlhf_core.prompts.prompt import Row

#: Endings of compressed JSON -> codec of Arrow.
_CODECS = {".gz": "gzip", ".zst": "zstd"}
#: Endings that can be read, in words.
READABLE = ".jsonl, .json (both also with .gz or .zst behind) or .parquet"
#: Digits of the largest float: readers of JSON disagree about what is longer.
_DIGITS = 309


def kind_of(path: Path) -> str | None:
    """`.jsonl`, `.json` or `.parquet`, by the name of the file; None for a file that cannot be read."""
    name = path.with_suffix("") if path.suffix in _CODECS else path
    if name.suffix == ".parquet" and name == path:
        return ".parquet"
    return name.suffix if name.suffix in (".jsonl", ".json") else None


def file_rows(path: Path, origin: str, place: str = "") -> Iterator[Row]:
    """Rows of a file that ``kind_of`` knows. ``place`` goes before `line 3` in messages and in the rows' places."""
    kind = kind_of(path)
    if kind == ".parquet":
        return table_rows(_parquet(path, f"prompts.source = {origin!r}{place and f', {place}'}"), place)
    return _json_rows(path, origin, place, either=kind == ".json")


def table_rows(table: Any, place: str = "") -> Iterator[Row]:
    """Rows of an Arrow table."""
    number = 0
    for batch in table.to_batches(max_chunksize=4096):
        for values in batch.to_pylist():
            number += 1
            yield Row(_at(place, f"row {number}"), values)


def _at(place: str, row: str) -> str:
    return f"{place}, {row}" if place else row


def _json_rows(path: Path, origin: str, place: str, either: bool) -> Iterator[Row]:
    """``either``: the file may also be one array of objects."""
    import pyarrow as pa

    where = f"prompts.source = {origin!r}{place and f', {place}'}"
    try:
        with _opened(path) as file:
            start = file.peek(4096)[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
            if either and start.startswith(b"["):
                yield from _array_rows(file.read(), where, place)
            else:
                yield from _line_rows(file, origin, place, either)
    except (OSError, pa.ArrowException) as error:
        raise PromptError(f"{where}: the file cannot be read: {error}") from None


def _opened(path: Path) -> AbstractContextManager[io.BufferedReader]:
    if path.suffix not in _CODECS:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(path, compression=_CODECS[path.suffix]))


def _array_rows(data: bytes, where: str, place: str) -> Iterator[Row]:
    try:
        values = _parsed(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: {_why(error)}") from None
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise PromptError(f"{where}, row {number}: a JSON {type(value).__name__}, but every row must be an object")
        yield Row(_at(place, f"row {number}"), value)


def _line_rows(file: io.BufferedReader, origin: str, place: str, either: bool) -> Iterator[Row]:
    for number, raw in enumerate(file, start=1):
        line_place = _at(place, f"line {number}")
        where = f"prompts.source = {origin!r}, {line_place}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            value = _parsed(line) if line else None
        except (ValueError, RecursionError) as error:
            form = "; a .json file is an array of objects, or one object a line" if either else ""
            raise PromptError(f"{where}: {_why(error)}{form}") from None
        if not line:
            continue
        if not isinstance(value, dict):
            raise PromptError(
                f"{where}: a JSON {type(value).__name__}, but every line must be an object with a prompt column"
            )
        yield Row(line_place, value)


def _parsed(text: str) -> Any:
    """The JSON value. ValueError (JSONDecodeError is one) also for numbers that no float can hold."""
    return json.loads(text, parse_int=_integer, parse_float=_float)


def _why(error: Exception) -> str:
    unreadable = isinstance(error, UnicodeDecodeError | json.JSONDecodeError | RecursionError)
    return f"not JSON in UTF-8: {error}" if unreadable else str(error)


def _integer(text: str) -> int:
    # The length first: converting takes quadratic time, and Python refuses more than some thousand digits.
    if len(text) >= _DIGITS and (len(text.lstrip("-")) > _DIGITS or math.isinf(float(text))):
        raise ValueError(_out_of_range(text))
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(_out_of_range(text))
    return value


def _out_of_range(text: str) -> str:
    shown = text if len(text) <= 24 else f"{text[:12]}... ({len(text)} characters)"
    return f"the number {shown} is beyond what JSON's readers agree on (1.8e308): write it as text, in quotes"


def _parquet(path: Path, where: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise PromptError(f"{where}: not a readable Parquet file: {error}") from None
