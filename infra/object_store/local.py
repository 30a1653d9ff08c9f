"""Objects as files below one folder. Whole after every crash: staged, fsynced, then moved or linked into place."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from infra.object_store.keys import STAGING, check_key, check_prefix, key_problem

_LEFTOVER_SECONDS = 24 * 3600.0  # no write takes this long, so an older staged file belongs to a process that died
_CHUNK = 4 * 2**20


class LocalObjectStore:
    """A folder as object store. The folder is made by the first write.

    A file is written to ``.staging/`` below the root, fsynced, and then renamed (``put``) or hard-linked (``create``),
    so readers see whole objects only and a killed writer leaves nothing visible. The root must be one file system.
    """

    def __init__(self, root: str | Path) -> None:
        # abspath, not resolve: a symlinked root may be pointed elsewhere later, and it stays readable in messages.
        self.root = Path(os.path.abspath(root))  # noqa: PTH100
        self._swept = False

    @property
    def url(self) -> str:
        """The absolute folder."""
        return str(self.root)

    def __repr__(self) -> str:
        return f"LocalObjectStore({str(self.root)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalObjectStore) and other.root == self.root

    def __hash__(self) -> int:
        return hash(self.root)

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object."""
        self._replace(key, lambda file: file.write(data))

    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if the key is absent; False if it exists."""
        target = self._path(key)
        staged = self._stage(lambda file: file.write(data))
        try:
            _make_folder(target.parent)
            os.link(staged, target)  # exclusive, and the whole content at once
        except FileExistsError:
            if target.is_dir():
                raise IsADirectoryError(f"object key {key!r} is a folder of other keys in {self.url}") from None
            return False
        finally:
            staged.unlink()
        _sync_folder(target.parent)
        return True

    def get(self, key: str) -> bytes:
        """The whole object."""
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise self._missing(key) from None

    def exists(self, key: str) -> bool:
        """Whether the object is there."""
        return self._path(key).is_file()

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below ``prefix``, sorted."""
        folder = self.root / check_prefix(prefix)
        if not folder.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and key_problem(entry.name) is None)

    def list(self, prefix: str) -> list[str]:
        """Keys below the folder ``prefix``, sorted. Files that are no objects of this store are left out."""
        checked = check_prefix(prefix)
        keys = []
        for folder, _, names in os.walk(self.root / checked):
            relative = os.path.relpath(folder, self.root)
            below = "" if relative == "." else f"{relative}/"
            keys += [f"{below}{name}" for name in names]
        return sorted(key for key in keys if key_problem(key) is None)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; absent ones are skipped. Folders stay, a writer may be about to use them."""
        for path in [self._path(key) for key in keys]:
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue

    def put_file(self, key: str, path: str) -> None:
        """Copy a local file into the store."""
        with Path(path).open("rb") as source:
            self._replace(key, lambda file: shutil.copyfileobj(source, file, _CHUNK))

    def get_file(self, key: str, path: str) -> None:
        """Copy an object to ``path``, which appears whole or not at all. Missing folders of ``path`` are made."""
        target = Path(path)
        try:
            source = self._path(key).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise self._missing(key) from None
        with source:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{uuid.uuid4().hex}.part")
            try:
                with partial.open("xb") as file:
                    shutil.copyfileobj(source, file, _CHUNK)
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _missing(self, key: str) -> FileNotFoundError:
        return FileNotFoundError(f"no object {key!r} in {self.url}")

    def _replace(self, key: str, write: Callable[[BinaryIO], object]) -> None:
        target = self._path(key)
        staged = self._stage(write)
        try:
            _make_folder(target.parent)
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def _stage(self, write: Callable[[BinaryIO], object]) -> Path:
        """A new fsynced file with the content, outside of every key."""
        folder = self.root / STAGING
        _make_folder(folder)
        self._sweep(folder)
        staged = folder / uuid.uuid4().hex
        try:
            with staged.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:  # also on Ctrl-C: nothing half written stays behind
            staged.unlink(missing_ok=True)
            raise
        return staged

    def _sweep(self, folder: Path) -> None:
        """Once a process, remove what killed writers left behind."""
        if self._swept:
            return
        self._swept = True
        for leftover in folder.iterdir():
            try:
                if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                    leftover.unlink()
            except FileNotFoundError:  # another process swept or finished it
                continue


def _make_folder(folder: Path) -> None:
    """mkdir -p whose new entries survive a power loss."""
    if folder.is_dir():
        return
    made = [folder, *folder.parents]
    made = [path for path in made if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # which would read as "the object exists"
        raise NotADirectoryError(f"{str(folder)!r} is an object, so no keys can be below it") from None
    for path in made:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
