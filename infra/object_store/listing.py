"""What lies in a store, with sizes and times: for garbage collection and people, never for correctness."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from infra.object_store.keys import check_prefix, key_problem
from infra.object_store.local import LocalObjectStore
from infra.object_store.s3 import S3ObjectStore


@dataclass(frozen=True)
class StoredObject:
    """One object. ``modified`` is in Unix seconds by the clock of the store."""

    key: str
    bytes: int
    modified: float


def list_objects(store: LocalObjectStore | S3ObjectStore, prefix: str) -> list[StoredObject]:
    """Objects below the folder ``prefix``, sorted by key; the same ones as ``store.list``. OSError if the store fails."""
    found = _local(store, prefix) if isinstance(store, LocalObjectStore) else _s3(store, prefix)
    return sorted(found, key=lambda entry: entry.key)


def _local(store: LocalObjectStore, prefix: str) -> list[StoredObject]:
    found = []
    for folder, _, names in os.walk(store.root / check_prefix(prefix)):
        for name in names:
            path = Path(folder) / name
            key = path.relative_to(store.root).as_posix()
            if key_problem(key) is not None:
                continue
            try:
                state = path.stat()
            except FileNotFoundError:  # deleted meanwhile
                continue
            found.append(StoredObject(key, state.st_size, state.st_mtime))
    return found


def _s3(store: S3ObjectStore, prefix: str) -> list[StoredObject]:
    checked = check_prefix(prefix)
    root = f"{store.prefix}/" if store.prefix else ""
    request = {"Prefix": f"{root}{checked}/" if checked else root}
    found: list[StoredObject] = []
    while True:
        page = store._request(checked, "list_objects_v2", **request)
        for entry in page.get("Contents", ()):
            key = entry["Key"][len(root) :]
            if key_problem(key) is None:
                found.append(StoredObject(key, int(entry["Size"]), entry["LastModified"].timestamp()))
        if not page.get("IsTruncated"):
            return found
        request["ContinuationToken"] = page["NextContinuationToken"]
