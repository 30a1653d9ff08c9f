"""Multipart uploads that nobody finished. Their parts are invisible, and paid for until somebody aborts them.

A folder has none: a killed writer leaves a file in the folder's staging area, which later writers remove.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.object_store.keys import check_prefix, key_problem
from infra.object_store.local import LocalObjectStore
from infra.object_store.s3 import S3ObjectStore
from infra.object_store.s3_errors import error_code

_MISSING = "NoSuchUpload"


@dataclass(frozen=True)
class Upload:
    """An upload that is neither complete nor aborted. ``started`` is in Unix seconds by the clock of the server."""

    key: str
    upload_id: str
    started: float
    bytes: int


def list_uploads(store: LocalObjectStore | S3ObjectStore, prefix: str) -> list[Upload]:
    """Unfinished uploads of objects below the folder ``prefix``, with what they hold. OSError if the store fails."""
    if isinstance(store, LocalObjectStore):
        return []
    checked = check_prefix(prefix)
    root = f"{store.prefix}/" if store.prefix else ""
    below = f"{root}{checked}/" if checked else root
    request = {"Prefix": below}
    found: list[Upload] = []
    while True:
        page = store._request(checked, "list_multipart_uploads", **request)
        for entry in page.get("Uploads", ()):
            key = entry["Key"][len(root) :]
            # Servers differ in what they take a prefix for, so the answer is checked.
            if entry["Key"].startswith(below) and key_problem(key) is None:
                size = _size(store, key, entry["UploadId"])
                found.append(Upload(key, entry["UploadId"], entry["Initiated"].timestamp(), size))
        if not page.get("IsTruncated"):
            return sorted(found, key=lambda upload: (upload.key, upload.upload_id))
        request |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def abort_uploads(store: LocalObjectStore | S3ObjectStore, uploads: Sequence[Upload]) -> None:
    """Discard the parts. Uploads that are complete or aborted by now are skipped. OSError if the store fails."""
    if isinstance(store, LocalObjectStore):
        return
    for upload in uploads:
        try:
            store._request(upload.key, "abort_multipart_upload", Key=store._name(upload.key), UploadId=upload.upload_id)
        except OSError as error:
            if not _is_gone(error):
                raise


def _size(store: S3ObjectStore, key: str, upload_id: str) -> int:
    total, request = 0, {"Key": store._name(key), "UploadId": upload_id}
    while True:
        try:
            page = store._request(key, "list_parts", **request)
        except OSError as error:
            if _is_gone(error):  # finished while we looked
                return total
            raise
        total += sum(int(part["Size"]) for part in page.get("Parts", ()))
        if not page.get("IsTruncated"):
            return total
        request["PartNumberMarker"] = page["NextPartNumberMarker"]


def _is_gone(error: OSError) -> bool:
    return error_code(error) in (_MISSING, "404", "NoSuchKey") or isinstance(error, FileNotFoundError)
