"""Local files that a run's killed processes left below RLHF_HOME."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from infra.object_store.listing import StoredObject
from rlhf_core.buffer import find_stage
from rlhf_core.lineage import Lineage
from tasks.garbage.verdicts import Store, Verdict, data_place
from tasks.names import namespace_of

#: A finished segment that the store did not take yet; its file is named after its key.
_SEGMENT = ".segment"


def find_files(
    store: Store, home: Path, lineage: Lineage, branches: Sequence[str]
) -> Iterator[tuple[StoredObject, Verdict]]:
    """The files of these branches below ``HOME/staging`` (path, size and time), each with whether it may go."""
    for branch in branches:
        for folder, _, names in os.walk(home / "staging" / namespace_of(store.url) / branch):
            for name in names:
                path = Path(folder) / name
                try:
                    state = path.lstat()
                except FileNotFoundError:  # whoever made it has deleted it
                    continue
                verdict = _segment(store, lineage, branches, name) if name.endswith(_SEGMENT) else _temporary()
                yield StoredObject(str(path), state.st_size, state.st_mtime), verdict


def delete_files(paths: Iterable[str]) -> None:
    """Delete the files, and the folders that are empty afterwards."""
    folders = set()
    for path in map(Path, paths):
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
        _prune(folder)


def _prune(folder: Path) -> None:
    while folder.name != "staging":
        if folder.is_dir():
            try:
                folder.rmdir()
            except OSError:  # not empty
                return
        folder = folder.parent


def _temporary() -> Verdict:
    return Verdict("local file", "a temporary file of a process that is gone", exclusive=True, patient=True)


def _segment(store: Store, lineage: Lineage, branches: Sequence[str], name: str) -> Verdict:
    key = unquote(name.removesuffix(_SEGMENT))
    for branch in branches:
        place = data_place(branch, key)
        if place is not None and (branch != lineage.head or find_stage(store, branch, *place) is not None):
            return Verdict("local file", "a segment that no stage needs any more", exclusive=True, patient=True)
    reason = "a finished segment that waits for the store: `rlhf resume` uploads it"
    return Verdict("local file", reason, exclusive=True, patient=True, stays=True)
