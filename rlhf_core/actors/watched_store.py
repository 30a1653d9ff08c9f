"""The object store as a worker uses it: while a call is under way, the worker waits and does not hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rlhf_core.ports import ObjectStore
from rlhf_core.progress import Progress

T = TypeVar("T")


class WatchedStore:
    """``inner``, whose calls are noted as waits in ``progress``. Stays in its process."""

    def __init__(self, inner: ObjectStore, progress: Progress) -> None:
        self.inner, self._progress = inner, progress

    @property
    def url(self) -> str:
        """That of the inner store."""
        return self.inner.url

    def put(self, key: str, data: bytes) -> None:
        """As the inner store."""
        self._wait(lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """As the inner store."""
        return self._wait(lambda: self.inner.create(key, data))

    def get(self, key: str) -> bytes:
        """As the inner store."""
        return self._wait(lambda: self.inner.get(key))

    def exists(self, key: str) -> bool:
        """As the inner store."""
        return self._wait(lambda: self.inner.exists(key))

    def folders(self, prefix: str) -> list[str]:
        """As the inner store."""
        return self._wait(lambda: self.inner.folders(prefix))

    def list(self, prefix: str) -> list[str]:
        """As the inner store."""
        return self._wait(lambda: self.inner.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """As the inner store."""
        self._wait(lambda: self.inner.delete(keys))

    def put_file(self, key: str, path: str) -> None:
        """As the inner store."""
        self._wait(lambda: self.inner.put_file(key, path))

    def get_file(self, key: str, path: str) -> None:
        """As the inner store."""
        self._wait(lambda: self.inner.get_file(key, path))

    def _wait(self, call: Callable[[], T]) -> T:
        with self._progress.waiting("the object store"):
            return call()
