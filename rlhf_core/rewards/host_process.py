"""The reward host: a process of its own in which reward functions live. ``python -m`` this module; see ``host``.

User code runs on its main thread, one call after the other, with one event loop for the life of the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import rlhf_core
from rlhf_core.errors import RewardError
from rlhf_core.rewards.messages import HEADER, Call, Load, Reply, decode_message, digest_file, encode_message


class _Imported:
    """Which files of the user were imported so far: all that belong neither to Python, nor to a package, nor to us."""

    def __init__(self) -> None:
        own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        self._installed = tuple(f"{folder}{os.sep}" for folder in (*own, *rlhf_core.__path__))
        self._known: set[str] = set()
        self._modules = 0

    def new(self) -> dict[str, str]:
        if len(sys.modules) == self._modules:
            return {}
        self._modules = len(sys.modules)
        # Not getattr: modules that load themselves lazily would do so now.
        files = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
        fresh = {f for f in files if isinstance(f, str) and f.endswith(".py") and not f.startswith(self._installed)}
        fresh -= self._known
        self._known |= fresh
        return {file: digest for file in sorted(fresh) if (digest := digest_file(file)) is not None}


def _receive(requests: BinaryIO) -> Load | Call | None:
    """The next request; None: there will be no more."""
    header = requests.read(HEADER.size)
    size = HEADER.unpack(header)[0] if len(header) == HEADER.size else 0
    body = requests.read(size)
    if not size or len(body) < size:
        _end()  # the other side is gone without a word
    return decode_message(body)


def _end() -> None:
    """End this process and all that it started."""
    os.killpg(0, signal.SIGKILL)


def serve(channel: socket.socket, ready: Callable[[], None]) -> None:
    """Answer requests until there are no more."""
    from rlhf_core.rewards.calling import call_reward
    from rlhf_core.rewards.loading import resolve_reward

    functions: dict[str, Callable[..., Any]] = {}
    imported = _Imported()
    with asyncio.Runner() as runner, channel.makefile("rb") as requests:
        loop = runner.get_loop()

        def answer(request: Load | Call) -> Any:
            asyncio.set_event_loop(loop)  # user code may have called asyncio.run, which leaves none
            if isinstance(request, Load):
                resolved = resolve_reward(request.function, request.options)
                functions[request.name] = resolved.function
                return resolved.asks_for
            return call_reward(request.name, functions[request.name], request.batch, request.sample_ids, loop)

        ready()
        while (request := _receive(requests)) is not None:
            value, failure = None, None
            try:
                value = answer(request)
            except RewardError as error:
                failure = str(error)
            channel.sendall(encode_message(Reply(value, failure, imported.new())))
        # Open connections of user code are cancelled now, which is no news for anybody.
        loop.set_exception_handler(lambda *_: None)


def _end_with(life: int) -> None:
    """End when the other side of the pipe is gone, in whatever way it went, also in the middle of a call."""
    os.read(life, 1)
    _end()


def main() -> None:
    """``python -m rlhf_core.rewards.host_process CHANNEL LIFE FOLDER``: two inherited descriptors, and the folder of the
    functions' files (empty: none)."""
    descriptors, folder = [int(word) for word in sys.argv[1:3]], sys.argv[3]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    sys.argv = [sys.argv[0]]
    threading.Thread(target=_end_with, args=(descriptors[1],), daemon=True).start()
    # As for a script: files beside it come first. The folder of the run comes last, where it can hide nothing.
    sys.path[:] = [*([folder] if folder else []), *sys.path, str(Path.cwd())]
    channel = socket.socket(fileno=descriptors[0])
    serve(channel, lambda: channel.sendall(encode_message(Reply(None, None, {}))))


if __name__ == "__main__":
    main()
