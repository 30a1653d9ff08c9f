"""Rows from files, folders and data sets. What cannot be read is a PromptError with the reason and the fix."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_core.errors import PromptError
from rlhf_core.prompts.files import READABLE, file_rows, kind_of, table_rows
from rlhf_core.prompts.prompt import Row

#: Endings that say "this is a file", so that a typo in a file name is not looked up as a data set id.
_FILE_ENDINGS = {
    *(".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".feather", ".xlsx", ".yaml", ".yml"),
    *(".gz", ".zst", ".zip"),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_rows(source: str, split: str, config: str | None = None) -> Iterator[Row]:
    """Rows of a file, of the files that a pattern matches, of a folder, or of a Hugging Face data set.

    Several files are read in the order of their names. ``split`` and ``config`` (the data set's configuration) count for
    folders and data sets.
    """
    if "://" in source:
        raise PromptError(
            f"prompts.source = {source!r} is an address: copy the files to this machine, and name their path"
        )
    path = Path(source)
    if path.is_dir():
        return _folder_rows(path, source, split, config)
    if not names_files(source):
        return table_rows(_hub_dataset(source, split, config))
    if config is not None:
        raise PromptError(f"prompts.config = {config!r} names a configuration of a data set, but {source!r} is a file")
    if glob.has_magic(source) and not path.exists():
        return _pattern_rows(source)
    if path.is_file() and kind_of(path):
        return file_rows(path, source)
    if path.exists() or (path.suffix and kind_of(path) is None):
        raise PromptError(f"prompts.source = {source!r}: unknown file ending {path.suffix!r}; convert it to {READABLE}")
    if kind_of(path):
        raise PromptError(f"prompts.source = {source!r}: the file does not exist (looked at {str(path.absolute())!r})")
    raise PromptError(
        f"prompts.source = {source!r} is neither an existing file or folder nor a Hugging Face data set id (`owner/name`)"
    )


def names_files(source: str) -> bool:
    """Whether the source is one of files on this machine, there or not, and no Hugging Face data set."""
    path = Path(source)
    return path.exists() or path.suffix in _FILE_ENDINGS or not _HUB_ID.fullmatch(source)


def is_gone(source: str) -> bool:
    """Whether the source is one of files, and none of them is there."""
    return names_files(source) and not Path(source).exists() and not _matches(source)


def _matches(source: str) -> list[Path]:
    names = glob.glob(source, recursive=True)  # noqa: PTH207 - pathlib refuses some patterns, and wants a root for others
    return sorted(Path(name) for name in names)


def _pattern_rows(source: str) -> Iterator[Row]:
    files = [path for path in _matches(source) if path.is_file()]
    if not files:
        raise PromptError(f"prompts.source = {source!r}: the pattern matches no file")
    return _files_rows(files, source)


def _files_rows(files: list[Path], source: str) -> Iterator[Row]:
    unknown = [str(file) for file in files if kind_of(file) is None]
    if unknown:
        raise PromptError(
            f"prompts.source = {source!r}: {unknown[0]!r} cannot be read: name the files by a pattern, such as "
            f"`FOLDER/*.parquet`; files end with {READABLE}"
        )
    return (row for file in files for row in file_rows(file, source, str(file)))


def _folder_rows(path: Path, source: str, split: str, config: str | None) -> Iterator[Row]:
    if not (path / "dataset_dict.json").is_file() and not (path / "state.json").is_file():
        return _files_rows(_data_files(path, source, split, config), source)
    if config is not None:
        raise PromptError(
            f"prompts.config = {config!r}: {source!r} was saved by `datasets.save_to_disk` and has no configurations"
        )
    return table_rows(_saved_dataset(path, source, split))


def _data_files(path: Path, source: str, split: str, config: str | None) -> list[Path]:
    """The files of a split in a folder, sorted: as its README.md says, or by their names, in the way of `datasets`.

    Only the names come from there: the rows are read here, where every bad one has a place.
    """
    if not any(kind_of(file) for file in path.rglob("*")):
        raise PromptError(
            f"prompts.source = {source!r}: the folder was not saved by `datasets.save_to_disk` (no dataset_dict.json or "
            f"state.json in it) and has no file that can be read: {READABLE}"
        )
    import datasets

    try:
        found = datasets.load_dataset_builder(str(path.absolute()), config).config.data_files
    except Exception as error:  # boundary: what is wrong with a folder has no common base
        raise PromptError(
            f"prompts.source = {source!r}{_in(config)}: {_reason(error)}. prompts.config names the configuration"
        ) from error
    splits = {str(name): sorted(Path(file) for file in files) for name, files in (found or {}).items()}
    if split not in splits:
        names = ", ".join(map(repr, splits)) or "none"
        raise PromptError(f"prompts.split = {split!r}: {source!r}{_in(config)} has the splits {names}")
    _check_one_kind(path, source, [file for files in splits.values() for file in files])
    return splits[split]


def _check_one_kind(path: Path, source: str, taken: list[Path]) -> None:
    """PromptError if files were left out because there are more of another kind. A README.md may leave out what it likes."""
    if (path / "README.md").exists():
        return
    known = {file.resolve() for file in taken}
    data = (file for file in sorted(path.rglob("*")) if kind_of(file) in (".jsonl", ".parquet"))
    hidden = (".", "__")  # what `datasets` does not look at
    left = [
        file
        for file in data
        if file.resolve() not in known and not any(p.startswith(hidden) for p in file.relative_to(path).parts)
    ]
    if left:
        raise PromptError(
            f"prompts.source = {source!r}: the folder holds files of several kinds, such as {str(taken[0])!r} and "
            f"{str(left[0])!r}: name those to read by a pattern"
        )


def _saved_dataset(path: Path, source: str, split: str) -> Any:
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


def _hub_dataset(source: str, split: str, config: str | None = None) -> Any:
    import datasets

    try:
        loaded = datasets.load_dataset(source, config, split=split)
    except Exception as error:  # boundary: hub, network and builder errors have no common base
        raise PromptError(
            f"prompts.source = {source!r} (split {split!r}){_in(config)} is no existing path and could not be loaded from "
            f"the Hugging Face hub: {_reason(error)}. Check the id, prompts.config, prompts.split and the network, or "
            "name a .jsonl or .parquet file"
        ) from error
    return loaded.with_format("arrow")[:]


def _in(config: str | None) -> str:
    return "" if config is None else f", prompts.config = {config!r}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
