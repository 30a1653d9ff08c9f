"""A store that outlasts outages: what fails because the store is away is tried again until it is back."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from infra.object_store.local import LocalObjectStore
from infra.object_store.s3 import S3ObjectStore
from infra.object_store.s3_errors import error_code, was_damaged

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE = 0.25  # seconds; doubles up to the longest
_LONGEST_PAUSE = 10.0
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_PASSING_STATUS = frozenset({307, 408, 409, 425, 429})  # of the 3xx and 4xx those that mean "later"
_PASSING_CODES = frozenset({"RequestTimeout"})  # S3 answers 400 for a body that came too slowly


class PatientStore:
    """``inner``, with every call repeated for up to ``seconds`` while the store does not answer or is overloaded.

    Pauses between calls double from a quarter of a second to 10 s, less up to half by chance, so that many processes do
    not come back at once. What waiting cannot mend is raised at once: a missing key, refused credentials, an unknown
    bucket, a request that the server refuses, a key that is no key, an object that does not match the checksum of its
    own server. After ``seconds`` the last error is raised again, saying how long it was tried. A call of ``inner`` is
    never interrupted, so the last one may end later. 0 seconds: no repetition.

    Repeating is safe. ``create`` may then say False for its own write, as after any lost answer: callers read back and
    compare. Pickles as configuration only. Threads may share one.
    """

    def __init__(self, inner: LocalObjectStore | S3ObjectStore, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"patience of {seconds} s for {inner.url}: a number of seconds from 0 on is needed")
        self.inner = inner
        self.seconds = seconds
        self._outage = _Outage()

    @property
    def url(self) -> str:
        """That of the inner store."""
        return self.inner.url

    def __repr__(self) -> str:
        return f"PatientStore({self.inner!r}, {self.seconds:g})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PatientStore) and (other.inner, other.seconds) == (self.inner, self.seconds)

    def __hash__(self) -> int:
        return hash((self.inner, self.seconds))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner, self.seconds)

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object."""
        self._ride(lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if the key is absent; False if it exists, which may be by this very call."""
        return self._ride(lambda: self.inner.create(key, data))

    def get(self, key: str) -> bytes:
        """The whole object."""
        return self._ride(lambda: self.inner.get(key))

    def exists(self, key: str) -> bool:
        """Whether the object is there."""
        return self._ride(lambda: self.inner.exists(key))

    def folders(self, prefix: str) -> list[str]:
        """As the store's own, with patience."""
        return self._ride(lambda: self.inner.folders(prefix))

    def list(self, prefix: str) -> list[str]:
        """Keys below the folder ``prefix``, sorted."""
        return self._ride(lambda: self.inner.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; absent ones are skipped."""
        self._ride(lambda: self.inner.delete(keys))

    def put_file(self, key: str, path: str) -> None:
        """Upload a local file. It is read again by every try, so it must stay as it is until then."""
        self._ride(lambda: self.inner.put_file(key, path))

    def get_file(self, key: str, path: str) -> None:
        """Download an object to ``path``, which appears whole or not at all."""
        self._ride(lambda: self.inner.get_file(key, path))

    def close(self) -> None:
        """Close this process's connections, if the inner store has any. The store stays usable."""
        if isinstance(self.inner, S3ObjectStore):
            self.inner.close()

    def _ride(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
        except OSError as error:
            if not self.seconds or not may_pass(error):
                raise
            failure = error
        self._outage.enter(self, failure)
        answered = False
        try:
            result = self._repeat(call, began, failure)
            answered = True
            return result
        except OSError as error:
            answered = not may_pass(error)  # "no such object" is an answer too
            raise
        finally:
            self._outage.leave(self, answered)

    def _repeat(self, call: Callable[[], T], began: float, failure: OSError) -> T:
        pause, tries = _FIRST_PAUSE, 1
        while (left := began + self.seconds - time.monotonic()) > 0:
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                return call()
            except OSError as error:
                if not may_pass(error):
                    raise
                failure, tries = error, tries + 1
        _give_up(failure, time.monotonic() - began, tries)


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later because only the store or the way to it is in trouble."""
    if isinstance(error, _FINAL):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "FlexibleChecksumError":
            return False  # S3ObjectStore has read it several times: the object or the way is damaged, not away
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return _status_may_pass(status, error)
        cause = cause.__cause__
    return True


def _status_may_pass(status: int, error: OSError) -> bool:
    if status == 501:  # a server without this operation
        return False
    if not 300 <= status < 500 or status in _PASSING_STATUS:
        return True
    return error_code(error) in _PASSING_CODES or was_damaged(error)


def _give_up(failure: OSError, seconds: float, tries: int) -> NoReturn:
    text = f"{failure.strerror or failure} (tried {tries} times in {seconds:.0f} s)"
    if failure.errno is not None:
        raise OSError(failure.errno, text) from failure  # picks the subclass that belongs to the number
    raise (ConnectionError if isinstance(failure, ConnectionError) else OSError)(text) from failure


class _Outage:
    """What the log says about an outage: one line at its begin and one at its end, however many calls wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0

    def enter(self, store: PatientStore, failure: OSError) -> None:
        """A call starts to wait."""
        with self._lock:
            self._waiting += 1
            if self._waiting > 1:
                return
            self._since = time.monotonic()
        _LOG.warning("%s fails, trying again for up to %.0f s: %s", store.url, store.seconds, failure)

    def leave(self, store: PatientStore, answered: bool) -> None:
        """A call got its answer, or waits no longer."""
        with self._lock:
            self._waiting -= 1
            if self._waiting or not answered:
                return
            seconds = time.monotonic() - self._since
        # As loud as the first line: whoever read that one wants to know.
        _LOG.warning("%s answers again after %.1f s", store.url, seconds)
