"""Rows from files and data sets. What cannot be read is a PromptError with the reason and the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_core.errors import PromptError
from rlhf_core.prompts.prompt import Row

#: Endings that say "this is a file", so that a typo in a file name is not looked up as a data set id.
_FILE_ENDINGS = {".json", ".csv", ".tsv", ".txt", ".arrow", ".feather", ".xlsx", ".yaml", ".yml", ".gz", ".zst", ".zip"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_rows(source: str, split: str) -> Iterator[Row]:
    """Rows of a `.jsonl` or `.parquet` file, a folder saved by `datasets`, or a Hugging Face data set."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _table_rows(_saved_dataset(path, source, split))
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise PromptError(
                f"prompts.source = {source!r}: the file does not exist (looked at {str(path.absolute())!r})"
            )
        return _jsonl_rows(path, source) if path.suffix == ".jsonl" else _table_rows(_parquet(path, source))
    if path.exists() or path.suffix in _FILE_ENDINGS:
        raise PromptError(
            f"prompts.source = {source!r}: unknown file ending {path.suffix!r}; convert it to .jsonl or .parquet"
        )
    if not _HUB_ID.fullmatch(source):
        raise PromptError(
            f"prompts.source = {source!r} is neither an existing file or folder nor a Hugging Face data set id "
            "(`owner/name`)"
        )
    return _table_rows(_hub_dataset(source, split))


def _jsonl_rows(path: Path, source: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                value = json.loads(line) if line else None
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                raise PromptError(f"prompts.source = {source!r}, {place}: not JSON in UTF-8: {error}") from None
            if not line:
                continue
            if not isinstance(value, dict):
                raise PromptError(
                    f"prompts.source = {source!r}, {place}: a JSON {type(value).__name__}, "
                    "but every line must be an object with a prompt column"
                )
            yield Row(place, value)


def _parquet(path: Path, source: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise PromptError(f"prompts.source = {source!r}: not a readable Parquet file: {error}") from None


def _saved_dataset(path: Path, source: str, split: str) -> Any:
    if not (path / "dataset_dict.json").is_file() and not (path / "state.json").is_file():
        raise PromptError(
            f"prompts.source = {source!r}: the folder was not saved by `datasets.save_to_disk` "
            "(no dataset_dict.json or state.json in it); name a .jsonl or .parquet file inside it instead"
        )
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # boundary: a damaged folder fails in many ways, all of them end as the user's error
        raise PromptError(f"prompts.source = {source!r}: cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise PromptError(f"prompts.split = {split!r}: {source!r} has the splits {', '.join(map(repr, loaded))}")
        loaded = loaded[split]
    elif loaded.split is not None and str(loaded.split) != split:
        raise PromptError(
            f"prompts.split = {split!r}: {source!r} holds the split {str(loaded.split)!r}; set prompts.split to it"
        )
    # As Arrow, because it does not decode images or audio that may sit in other columns.
    return loaded.with_format("arrow")[:]


def _hub_dataset(source: str, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_dataset(source, split=split)
    except Exception as error:  # boundary: hub, network and builder errors have no common base
        reason = " ".join(str(error).split()).rstrip(".")
        raise PromptError(
            f"prompts.source = {source!r} (split {split!r}) is no existing path and could not be loaded from the "
            f"Hugging Face hub: {type(error).__name__}: {reason}. Check the id, prompts.split and the network, or "
            "name a .jsonl or .parquet file"
        ) from error
    return loaded.with_format("arrow")[:]


def _table_rows(table: Any) -> Iterator[Row]:
    number = 0
    for batch in table.to_batches(max_chunksize=4096):
        for values in batch.to_pylist():
            number += 1
            yield Row(f"row {number}", values)
