"""Objects in an S3 bucket through s3fs, with the settings under which it is safe and bounded.

Endpoint and credentials come from the environment through the AWS libraries (``AWS_ENDPOINT_URL_S3``,
``AWS_ENDPOINT_URL``, the AWS credential chain). A store object holds bucket and prefix only.

s3fs is used narrowly, because its conveniences are not safe here: listings are never cached (a cached listing never
expires), files are never opened for writing (an exception inside ``with`` commits half an object), reads are one GET
(only whole-object GETs are checked against the stored checksum), and its retry loop multiplies with botocore's, so both
are bounded. Bytes that were damaged on the way are sent or fetched again, which neither of them does.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from infra.object_store.keys import check_key, check_prefix, key_problem
from infra.object_store.s3_errors import error_code, explain, transport_errors, was_damaged

T = TypeVar("T")

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_PART = 16 * 2**20  # bytes of one part of a file transfer
_PARTS_AT_ONCE = 4  # so at most 64 MiB of a file are in memory
_TRIES = 3
_CREATE_TRIES = 6
_EXISTS = frozenset({"PreconditionFailed", "412"})
_BUSY = frozenset({"ConditionalRequestConflict", "OperationAborted", "409", "SlowDown", "InternalError"}) | frozenset(
    {"ServiceUnavailable", "500", "503"}
)


@dataclass(frozen=True)
class Bounds:
    """Seconds and attempts of botocore; s3fs tries twice around them."""

    connect_seconds: float = 5.0
    read_seconds: float = 20.0
    attempts: int = 3


class S3ObjectStore:
    """``s3://bucket/prefix`` as object store.

    Safe to pickle: the client is made on first use in each process. Threads may share one; a forked child may not.
    """

    def __init__(
        self, bucket: str, prefix: str = "", endpoint: str | None = None, bounds: Bounds | None = None
    ) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"S3 bucket {bucket!r}: 3 to 63 letters, digits, '-', '.' or '_' are allowed")
        self.bucket = bucket
        self.prefix = check_prefix(prefix.strip("/"))
        self.endpoint = endpoint
        self.bounds = bounds or Bounds()
        self._fs: Any = None
        self._making = threading.Lock()

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``; the endpoint is a matter of the environment."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"S3ObjectStore({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3ObjectStore) and (other.url, other.endpoint) == (self.url, self.endpoint)

    def __hash__(self) -> int:
        return hash((self.url, self.endpoint))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bucket, self.prefix, self.endpoint, self.bounds)

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object: one PUT below 100 MB, else a multipart upload that appears when complete."""
        self._call(key, lambda fs: fs.pipe_file(self._path(key), data))

    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if the key is absent (``If-None-Match: *``).

        False also after an own write whose answer was lost: the caller reads back and compares.
        """
        path = self._path(key)
        for attempt in range(_CREATE_TRIES):
            try:
                self._call(key, lambda fs: fs.pipe_file(path, data, mode="create"))
                return True
            except FileExistsError:
                return False
            except OSError as error:
                code = error_code(error)
                if code in _EXISTS:
                    return False
                # 409: a racing conditional write is in flight. No client retries it; the winner is not known yet.
                if code not in _BUSY or attempt == _CREATE_TRIES - 1:
                    raise
            time.sleep(min(0.1 * 2**attempt, 2.0))
        raise AssertionError("unreachable")

    def get(self, key: str) -> bytes:
        """The whole object by one GET, checked against the checksum that the server stored at the write."""
        path = self._path(key)
        return self._call(key, lambda fs: fs.cat_file(path, max_concurrency=1))

    def exists(self, key: str) -> bool:
        """Whether the object is there. One HEAD; a prefix of other keys is no object."""
        try:
            self._size(key)
        except FileNotFoundError:
            return False
        return True

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below ``prefix``, sorted: the server groups the keys, nothing is listed below them."""
        checked = check_prefix(prefix)
        root = "/".join(part for part in (self.prefix, checked) if part)
        request = {"Prefix": f"{root}/" if root else "", "Delimiter": "/"}
        names: list[str] = []
        while True:
            page = self._request(checked, "list_objects_v2", **request)
            names += [entry["Prefix"].rstrip("/").rpartition("/")[2] for entry in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated"):
                return sorted(name for name in names if key_problem(name) is None)
            request["ContinuationToken"] = page["NextContinuationToken"]

    def list(self, prefix: str) -> list[str]:
        """Keys below the folder ``prefix``, sorted. Objects that no store wrote (other key alphabet) are left out."""
        checked = check_prefix(prefix)
        root = f"{self.prefix}/" if self.prefix else ""
        request = {"Prefix": f"{root}{checked}/" if checked else root}
        keys: list[str] = []
        while True:
            page = self._request(checked, "list_objects_v2", **request)
            keys += [entry["Key"][len(root) :] for entry in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return sorted(key for key in keys if key_problem(key) is None)
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects, 1000 a request; absent ones are skipped. OSError names the first one that was refused."""
        names = [self._name(key) for key in keys]
        for start in range(0, len(names), 1000):
            batch = [{"Key": name} for name in names[start : start + 1000]]
            answer = self._request(keys[start], "delete_objects", Delete={"Objects": batch, "Quiet": True})
            for refused in answer.get("Errors", ()):
                if refused.get("Code") != "NoSuchKey":
                    raise OSError(f"{self.url}: cannot delete {refused.get('Key')!r}: {refused.get('Code')}")

    def put_file(self, key: str, path: str) -> None:
        """Upload a local file in parts of 16 MiB, 4 at a time, and check that the object has its size."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file {path!r} to upload as {key!r}")
        target, size = self._path(key), Path(path).stat().st_size
        for _ in range(_TRIES):
            self._call(key, lambda fs: fs.put_file(path, target, chunksize=_PART, max_concurrency=_PARTS_AT_ONCE))
            found = self._size(key)
            if found == size:
                return
        raise OSError(f"{self.url}: {key!r} has {found} bytes after the upload of {size} bytes from {path!r}")

    def get_file(self, key: str, path: str) -> None:
        """Download to ``path``, which appears whole or not at all. Missing folders of ``path`` are made.

        Parts are ranged reads, which no checksum of the server covers: compare a digest where it matters.
        """
        source, target, size = self._path(key), Path(path), self._size(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{uuid.uuid4().hex}.part")
        options = {"chunksize": _PART, "max_concurrency": _PARTS_AT_ONCE}
        try:
            for _ in range(_TRIES):
                self._call(key, lambda fs: fs.get_file(source, str(partial), **options))
                found = partial.stat().st_size
                if found == size:
                    partial.replace(target)
                    return
        finally:
            partial.unlink(missing_ok=True)
        raise OSError(f"{self.url}: {key!r} has {size} bytes, the download {found}")

    def check_bucket(self) -> None:
        """FileNotFoundError if the bucket does not exist; other OSErrors as for every call."""
        try:
            self._request("", "head_bucket")
        except PermissionError:  # a key may be allowed to write objects without being allowed to see the bucket
            return

    def close(self) -> None:
        """Close this process's connections. The store stays usable: the next call opens new ones."""
        with self._making:
            fs, self._fs = self._fs, None
        if fs is not None and getattr(fs, "_s3creator", None) is not None:
            from fsspec.asyn import sync

            sync(fs.loop, fs._s3creator.__aexit__, None, None, None)

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    def _path(self, key: str) -> str:
        return f"{self.bucket}/{self._name(key)}"

    def _size(self, key: str) -> int:
        return int(self._request(key, "head_object", Key=self._name(key))["ContentLength"])

    def _request(self, key: str, method: str, **arguments: Any) -> dict[str, Any]:
        """One plain S3 request with the bounded retries of both layers; no cache, no folder semantics of s3fs."""
        return self._call(key, lambda fs: fs.call_s3(method, Bucket=self.bucket, **arguments))

    def _call(self, key: str, function: Callable[[Any], T]) -> T:
        for attempt in range(_TRIES):
            try:
                return function(self._client())
            except transport_errors() as error:
                if not was_damaged(error) or attempt == _TRIES - 1:
                    raise explain(error, self.url, key) from error
        raise AssertionError("unreachable")

    def _client(self) -> Any:
        with self._making:
            if self._fs is None:
                self._fs = _filesystem(self.endpoint, self.bounds)
            return self._fs


@cache
def _filesystem_class() -> Any:
    import s3fs

    return type("BoundedS3FileSystem", (s3fs.S3FileSystem,), {"retries": 2})  # tries of its own loop, 5 by default


def _filesystem(endpoint: str | None, bounds: Bounds) -> Any:
    return _filesystem_class()(
        endpoint_url=endpoint,
        use_listings_cache=False,
        skip_instance_cache=True,  # fsspec's cache would keep a client made with another environment
        max_concurrency=_PARTS_AT_ONCE,
        config_kwargs={
            "connect_timeout": bounds.connect_seconds,
            "read_timeout": bounds.read_seconds,
            "max_pool_connections": 32,
            "retries": {"mode": "standard", "total_max_attempts": bounds.attempts},
        },
    )
