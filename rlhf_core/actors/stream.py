"""Makes finished groups durable while the engine goes on: first on the local disk, then in the object store.

Two threads, so that neither encoding nor a slow store holds the engine up. What waits is bounded: when the store is down
and the staging budget is used up, ``add`` blocks, and generation waits for the store instead of filling the disk. When the
disk is full or broken, segments wait in memory instead, within the same budget.
What lies in the staging folder when the process dies is uploaded by ``upload_leftovers`` of the next attempt on the node.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

from rlhf_core.manifests import Shard
from rlhf_core.ports import ObjectStore

_LOG = logging.getLogger(__name__)
_SUFFIX = ".segment"

T = TypeVar("T")


class SegmentStream(Generic[T]):
    """One call of ``generate``. ``prepare`` turns a list of finished groups into a segment; it runs on a thread.

    ``size`` gives the bytes that a group takes while it waits, roughly; ``budget`` bounds what waits, in bytes.
    """

    def __init__(
        self,
        store: ObjectStore,
        prepare: Callable[[list[T]], tuple[Shard, bytes]],
        *,
        folder: Path,
        budget: int,
        flush_seconds: float,
        size: Callable[[T], int],
    ) -> None:
        self.store, self.folder, self.budget, self.flush_seconds = store, folder, budget, flush_seconds
        self._prepare, self._size = prepare, size
        self._groups: list[T] = []
        self._oldest = 0.0
        self._waiting = 0  # bytes of groups and staged segments that are not in the store yet
        self._closing = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._staged: queue.SimpleQueue[tuple[Shard, Path | bytes, int] | None] = queue.SimpleQueue()
        self._shards: list[Shard] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"segments-{work.__name__}", daemon=True)
            for work in (self._stage, self._upload)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, groups: Sequence[T]) -> None:
        """Hand over finished groups; they end up in one segment. Blocks while the budget is used up.

        Raises what made an earlier segment fail.
        """
        size = sum(self._size(group) for group in groups)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._waiting or self._waiting + size <= self.budget)
            self._raise()
            if not self._groups:
                self._oldest = time.monotonic()
            self._groups.extend(groups)
            self._waiting += size
            self._changed.notify_all()

    def finish(self) -> tuple[Shard, ...]:
        """Make everything durable; the segments written. Raises what made one fail."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._raise()
        return tuple(self._shards)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # a thread's boundary: add() and finish() raise it
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            self._staged.put(None)

    def _stage(self) -> None:
        """Cut the groups into segments, a segment for what finished within ``flush_seconds``, and write them to disk."""
        while batch := self._next_batch():
            shard, data = self._prepare(batch)
            self._staged.put((shard, self._keep(shard, data), sum(self._size(group) for group in batch)))
        self._staged.put(None)

    def _keep(self, shard: Shard, data: bytes) -> Path | bytes:
        """Where the segment waits for the store: on the disk; in memory, where the disk refuses it."""
        path = self.folder / f"{quote(shard.key, safe='')}{_SUFFIX}"
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except OSError as error:
            _LOG.warning("%s goes straight to the store: %s", shard.key, error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return data
        return path

    def _next_batch(self) -> list[T]:
        with self._changed:
            while not self._closing and self._failure is None:
                age = time.monotonic() - self._oldest
                full = self._waiting >= self.budget  # nobody can add more: do not wait for the clock
                if self._groups and (age >= self.flush_seconds or full):
                    break
                self._changed.wait(self.flush_seconds - age if self._groups else None)
            batch, self._groups = self._groups, []
            return [] if self._failure is not None else batch

    def _upload(self) -> None:
        while (item := self._staged.get()) is not None:
            shard, kept, size = item
            self.store.put(shard.key, kept if isinstance(kept, bytes) else kept.read_bytes())
            if not isinstance(kept, bytes):
                kept.unlink()
            self._shards.append(shard)
            with self._changed:
                self._waiting -= size
                self._changed.notify_all()


def upload_leftovers(store: ObjectStore, folder: Path) -> int:
    """Upload the segments that a killed process left in its staging folder; returns how many."""
    if not folder.is_dir():
        return 0
    count = 0
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        key = unquote(path.name.removesuffix(_SUFFIX))
        store.put(key, path.read_bytes())
        path.unlink()
        count += 1
    for partial in folder.glob("*.partial"):
        partial.unlink(missing_ok=True)
    if count:
        _LOG.info("uploaded %d segments that an earlier process left in %s", count, folder)
    return count
