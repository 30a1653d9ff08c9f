"""Files in the object store: uploaded with bounded memory, verified when they come back."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import blake3

from rlhf_core import layout
from rlhf_core.errors import CorruptObject
from rlhf_core.manifests import StoredFile
from rlhf_core.ports import ObjectStore

_TRANSFERS = 2
_TRIES = 3


def upload_files(store: ObjectStore, folder: Path, paths: Iterable[Path], prefix: str) -> list[StoredFile]:
    """Upload files that lie below ``folder`` to ``prefix``/their relative path."""

    def upload(path: Path) -> StoredFile:
        relative = path.relative_to(folder).as_posix()
        key = f"{prefix}/{relative}"
        store.put_file(key, str(path))
        return StoredFile(path=relative, key=key, bytes=path.stat().st_size, blake3=file_digest(path))

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        return list(pool.map(upload, sorted(paths)))


def download_files(store: ObjectStore, files: Iterable[StoredFile], folder: Path) -> None:
    """Download and verify. CorruptObject names the object; nothing outside ``folder`` is ever written."""

    def download(file: StoredFile) -> None:
        target = folder / layout.check_relpath(file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):  # it may have been damaged on the way
            try:
                store.get_file(file.key, str(target))
            except FileNotFoundError:
                raise CorruptObject(f"{file.key} is named by a record but missing in {store.url}") from None
            except OSError as error:
                if error.errno != errno.EBADMSG:
                    raise
                raise CorruptObject(f"{file.key}: {error}") from None
            if target.stat().st_size == file.bytes and file_digest(target) == file.blake3:
                return
        target.unlink()
        raise CorruptObject(f"{file.key} is not what its record says ({file.bytes} bytes, blake3 {file.blake3})")

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        list(pool.map(download, files))


def file_digest(path: Path) -> str:
    """blake3 of a file, 64 hex digits."""
    hasher = blake3.blake3()
    hasher.update_mmap(str(path))
    return hasher.hexdigest()
