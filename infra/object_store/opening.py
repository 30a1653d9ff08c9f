"""From a url to a store, and whether that store can be used."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import overload

from infra.object_store.local import LocalObjectStore
from infra.object_store.patient import PatientStore
from infra.object_store.s3 import Bounds, S3ObjectStore

# One attempt, made twice by s3fs: an endpoint that cannot be reached is reported after some 8 s, a mute one after 12 s.
_PROBE_BOUNDS = Bounds(connect_seconds=4.0, read_seconds=6.0, attempts=1)


@overload
def open_store(url: str) -> LocalObjectStore | S3ObjectStore:
    """The store itself."""


@overload
def open_store(url: str, patience_seconds: float) -> LocalObjectStore | S3ObjectStore | PatientStore:
    """Wrapped where patience is asked for."""


def open_store(url: str, patience_seconds: float = 0.0) -> LocalObjectStore | S3ObjectStore | PatientStore:
    """The store of ``s3://bucket/prefix``, ``file:///folder`` or a folder.

    With ``patience_seconds`` it is one that outlasts outages of up to that length (PatientStore). Relative folders are
    made absolute and ``~`` is expanded. Nothing is contacted, ``probe_store`` does that. ValueError for anything else.
    """
    store = _open(url)
    return PatientStore(store, patience_seconds) if patience_seconds else store


def bare_store(store: LocalObjectStore | S3ObjectStore | PatientStore) -> LocalObjectStore | S3ObjectStore:
    """The store itself, without patience: to see what kind it is, or for calls that must not wait."""
    return store.inner if isinstance(store, PatientStore) else store


def _open(url: str) -> LocalObjectStore | S3ObjectStore:
    if url.startswith("s3://"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        try:
            return S3ObjectStore(bucket, prefix)
        except ValueError as error:
            raise ValueError(f"store url {url!r}: {error}; write s3://bucket/prefix") from None
    folder = url.removeprefix("file://")
    if not folder.strip() or "\0" in folder:
        raise ValueError(f"store url {url!r} names no folder; write a folder or s3://bucket/prefix")
    if "://" in folder or folder.startswith("s3:"):
        raise ValueError(f"store url {url!r}: unknown scheme; write a folder, file:///folder or s3://bucket/prefix")
    return LocalObjectStore(Path(folder).expanduser())


def probe_store(store: LocalObjectStore | S3ObjectStore | PatientStore) -> None:
    """Create, read and delete a tiny object below ``.probe/``, and check that a second create of it is refused.

    Without patience: a store that is away is reported at once. PermissionError (credentials refused, folder not
    writable), ConnectionError (endpoint does not answer), FileNotFoundError (no such bucket) or OSError; the message
    names the url, the reason and the fix, and no secret.
    """
    store = bare_store(store)
    if isinstance(store, LocalObjectStore):
        _probe_local(store)
        return
    short = S3ObjectStore(store.bucket, store.prefix, store.endpoint, _PROBE_BOUNDS)
    try:
        short.check_bucket()  # first: some servers make a missing bucket on write
        _round_trip(short)
    except ValueError as error:  # botocore's answer to an endpoint without http:// or https://
        raise OSError(f"{store.url}: {error}: write AWS_ENDPOINT_URL as http(s)://host:port") from None
    finally:
        short.close()


def _probe_local(store: LocalObjectStore) -> None:
    try:
        _round_trip(store)
    except OSError as error:
        reason = error.strerror or str(error)
        kind = PermissionError if isinstance(error, PermissionError) else OSError
        raise kind(
            f"{store.url}: cannot write objects there ({reason}): choose a folder that this user may write, on a file "
            "system with hard links and free space"
        ) from error


def _round_trip(store: LocalObjectStore | S3ObjectStore) -> None:
    key, data = f".probe/{uuid.uuid4().hex}", b"probe"
    store.create(key, data)
    try:
        if store.get(key) != data:
            raise OSError(f"{store.url}: the probe object came back changed: do not trust this store")
        if store.create(key, b"other"):
            raise OSError(
                f"{store.url}: the server ignores If-None-Match, so two writers could both commit: use S3, or an "
                "S3-compatible server with conditional writes"
            )
    finally:
        store.delete([key])
