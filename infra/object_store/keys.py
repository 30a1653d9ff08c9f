"""Which keys are allowed. One rule for every backend, so that a run can move from a folder to S3 and back."""

from __future__ import annotations

import re

# What file systems, S3 and s3fs all take literally. Left out on purpose: `?versionId=` is syntax in s3fs, `*?[]` are
# globs there, `\` and control characters differ between file systems, spaces and `%` between URL encoders.
_SEGMENT = re.compile(r"[A-Za-z0-9._=+@,-][A-Za-z0-9._=+@,~-]{0,199}")
_LONGEST = 900  # S3 allows 1024 bytes including the store's prefix

#: Folder below a local root where objects are written before they are moved into place.
STAGING = ".staging"


def key_problem(key: object) -> str | None:
    """Why ``key`` is no valid object key, or None."""
    if not isinstance(key, str):
        return f"is {type(key).__name__}, not str"
    if not key:
        return "is empty"
    if len(key) > _LONGEST:
        return f"has {len(key)} characters, at most {_LONGEST} are allowed"
    if key.startswith("/"):
        return "starts with '/'"
    if ".." in key:
        return "contains '..'"
    for segment in key.split("/"):
        if not segment:
            return "has an empty segment"
        if segment == ".":
            return "has a '.' segment"
        if not _SEGMENT.fullmatch(segment):
            return f"has the segment {segment!r}; allowed are 1 to 200 of A-Z a-z 0-9 . _ = + @ , -"
    if key.split("/", 1)[0] == STAGING:
        return f"is below {STAGING!r}, which is reserved"
    return None


def check_key(key: str) -> str:
    """Return ``key``. ValueError says what is wrong with it."""
    problem = key_problem(key)
    if problem:
        raise ValueError(f"object key {key!r} {problem}")
    return key


def check_prefix(prefix: str) -> str:
    """Return the folder ``prefix`` without a trailing slash; empty means everything. ValueError if it is not valid."""
    return check_key(prefix.removesuffix("/")) if prefix else ""
