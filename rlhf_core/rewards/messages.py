"""What goes to a reward host and back, over a socket between two processes of one machine."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

#: Every message is a pickle behind its length.
HEADER = struct.Struct(">Q")


class Load(NamedTuple):
    """Import a function. Answered by the optional arguments that it asks for."""

    name: str
    function: str
    options: dict[str, Any]


class Call(NamedTuple):
    """Call a function that was loaded. Answered by a list of ``Answer``."""

    name: str
    batch: dict[str, Any]
    sample_ids: Sequence[str]


class Reply(NamedTuple):
    """``error`` is the message of a RewardError. ``files``: digests of user files that were imported since the last reply."""

    value: Any
    error: str | None
    files: dict[str, str]


def encode_message(message: object) -> bytes:
    """The message as it goes over the socket."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


def decode_message(data: bytes) -> Any:
    """The message that follows a header."""
    return pickle.loads(data)


def digest_file(path: str) -> str | None:
    """Digest of a file's content; None if it cannot be read."""
    try:
        return blake3(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
