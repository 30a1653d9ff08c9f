"""Sealed JSON records: written once by put-if-absent, verified on every read."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from blake3 import blake3
from pydantic import ValidationError

from rlhf_core.errors import CorruptObject, IntegrityError, NotCommitted
from rlhf_core.manifests import FORMAT_VERSION, Manifest
from rlhf_core.ports import ObjectStore

#: A Manifest with the fields ``format`` and ``digest``.
M = TypeVar("M", bound=Manifest)


def canonical(obj: Any) -> bytes:
    """The one JSON form of a value: sorted keys, no spaces, ASCII. ValueError for NaN and infinities."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(data: bytes) -> str:
    """blake3 of the bytes, 64 hex digits."""
    return blake3(data).hexdigest()


def seal(manifest: M) -> M:
    """A copy whose ``digest`` covers the canonical JSON of all its other fields.

    ValueError names the fields that hold NaN or infinity: JSON has neither, and pydantic would turn them into null.
    """
    _require_record(type(manifest))
    bad = list(_non_finite(manifest.model_dump()))
    if bad:
        raise ValueError(f"{type(manifest).__name__} cannot be committed: not finite: {', '.join(bad)}")
    body = manifest.model_dump(mode="json", exclude={"digest"})
    return manifest.model_copy(update={"digest": digest(canonical(body))})


def commit_record(store: ObjectStore, key: str, record: M) -> tuple[M, bool]:
    """Seal the record and write it if the key is absent; returns (the committed record, whether it is this one).

    The answer of a write can be lost, so after an error and after "exists already" the object itself decides. The
    error of the write is raised only where nothing is there.
    """
    sealed = seal(record)
    failure: OSError | None = None
    try:
        if store.create(key, canonical(sealed.model_dump(mode="json"))):
            return sealed, True
    except OSError as error:
        failure = error
    stored = find_record(store, key, type(sealed))
    if stored is None:
        raise failure or OSError(f"{store.url}: {key!r} exists according to a write, but cannot be read")
    return stored, _digest_of(stored) == _digest_of(sealed)


def load_record(store: ObjectStore, key: str, model: type[M]) -> M:
    """Read and verify a record.

    NotCommitted if nobody wrote it, CorruptObject if it is damaged or of another kind, IntegrityError if a newer
    version of this system wrote it, OSError if the store fails.
    """
    record = find_record(store, key, model)
    if record is None:
        raise NotCommitted(f"nobody has committed {key!r} in {store.url}")
    return record


def find_record(store: ObjectStore, key: str, model: type[M]) -> M | None:
    """As load_record, but None if nobody wrote it."""
    _require_record(model)
    try:
        raw = store.get(key)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EBADMSG:
            raise
        raise CorruptObject(f"{key!r} in {store.url}: {error}") from None
    where = f"{key!r} in {store.url}"
    try:
        body = json.loads(raw)
    except ValueError as error:  # broken JSON or UTF-8
        raise CorruptObject(f"{where} is not JSON: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("digest"), str) or type(body.get("format")) is not int:
        raise CorruptObject(f"{where} is no sealed record: it lacks a digest or a format number")
    if body["format"] > FORMAT_VERSION:
        raise IntegrityError(
            f"{where} has format {body['format']}, this version reads formats up to {FORMAT_VERSION}: "
            "use a newer prefect-rlhf"
        )
    content = {name: value for name, value in body.items() if name != "digest"}
    try:
        found = digest(canonical(content))
    except ValueError as error:  # json.loads accepts NaN, which no record holds
        raise CorruptObject(f"{where}: {error}") from None
    if found != body["digest"]:
        raise CorruptObject(f"{where} was changed: its digest is {found}, it says {body['digest']}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise CorruptObject(f"{where} is no {model.__name__}: {error}") from None


def _require_record(model: type[Manifest]) -> None:
    missing = {"format", "digest"} - model.model_fields.keys()
    if missing:
        raise TypeError(f"{model.__name__} is no record: it has no field {sorted(missing)}")


def _digest_of(record: Manifest) -> str:
    return str(getattr(record, "digest"))  # noqa: B009  # Manifest itself has no digest, records do


def _non_finite(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{where} = {value}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _non_finite(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{where}[{index}]")
