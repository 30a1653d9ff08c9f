"""Actors that compute on one thread only."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

#: Calls that must not wait for work.
CONTROL = ("claim", "pulse", "status")


def on_one_thread(actor: C) -> C:
    """Class decorator: the constructor and all calls but ``CONTROL`` run one after another on one thread of the actor's own.

    OpenMP keeps a pool of threads for every thread that it was called from. Ray constructs an actor on one thread and calls it
    on another, which makes two pools; with more threads than cores libgomp stops spinning at its barriers and sleeps, which
    cost generation on a CPU 13 %.
    """
    for name, method in inspect.getmembers(actor, inspect.isfunction):
        if name == "__init__":
            actor.__init__ = _constructing(method)  # type: ignore[misc]
        elif not name.startswith("_") and name not in CONTROL:
            setattr(actor, name, _working(method))
    return actor


def _constructing(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="work")
        self._thread_id = self._thread.submit(threading.get_ident).result()
        self._thread.submit(method, self, *args, **kwargs).result()

    return construct


def _working(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def work(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == self._thread_id:  # called by another method of the actor
            return method(self, *args, **kwargs)
        return self._thread.submit(method, self, *args, **kwargs).result()

    return work
