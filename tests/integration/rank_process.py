"""One trainer rank in a process of its own: makes engines and calls their methods as the test asks. Not a test itself.

Run as ``python rank_process.py FD``, FD being an inherited end of a ``multiprocessing.Pipe``. A request is the pickled
tuple (operation, engine name, arguments); the answer is the pickled pair (result, error).
"""

from __future__ import annotations

import gc
import pickle
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any


def answer(engines: dict[str, Any], operation: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Do one thing. ``start`` makes an engine, ``drop`` forgets it, ``get`` reads an attribute, ``self_test`` is
    ``exactness.self_test``, the rest are methods."""
    if operation == "start":
        from rlhf_core.engines.zero3_engine import Zero3Engine

        engines[name] = Zero3Engine(*arguments)
        return None
    if operation == "drop":
        engines.pop(name).engine.destroy()
        gc.collect()
        return None
    if operation == "get":
        return getattr(engines[name], arguments[0])
    if operation == "self_test":
        from rlhf_core.engines.exactness import self_test

        return self_test(engines[name])
    result = getattr(engines[name], operation)(*arguments)
    if isinstance(result, Iterator):  # buckets: the tensor is reused by the next one
        return [(spec, flat.clone()) for spec, flat in result]
    return result


def main() -> None:
    """Answer until the other end closes."""
    engines: dict[str, Any] = {}
    with Connection(int(sys.argv[1])) as connection:
        while True:
            try:
                request = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                reply: tuple[Any, BaseException | None] = (answer(engines, *request), None)
            except Exception as error:  # noqa: BLE001 - the boundary: the test sees it, with its traceback as a note
                error.add_note(traceback.format_exc())
                reply = (None, error)
            connection.send_bytes(pickle.dumps(reply))


if __name__ == "__main__":
    main()
