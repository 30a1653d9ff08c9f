"""Finding and ending the processes of a stack.

Every process of a stack inherits a variable with the stack's identity. It tells them apart from all other processes,
also when the supervisor was killed, state files are lost, or a process left its group and parent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil

from infra.services.programs import MARKER


def stack_processes(identity: str) -> list[psutil.Process]:
    """Living processes of this user that belong to the stack. Never this process or one that it descends from."""
    spared = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in spared or process.uids().real != os.getuid():
                continue
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) == identity:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended while we looked, or the system does not let us look: not one of ours
    return found


def end(processes: Sequence[psutil.Process], grace_seconds: float) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL after the grace. Returns what is still alive. psutil refuses a pid that was used again."""
    for process in processes:
        _signal(process, kill=False)
    alive = _wait(processes, grace_seconds)
    for process in alive:
        _signal(process, kill=True)
    return _wait(alive, 5.0)


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return  # it ended by itself


def _wait(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still live after the seconds. One that waits for its parent's wait() has ended."""
    deadline = time.monotonic() + seconds
    alive = [process for process in processes if _is_alive(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = [process for process in alive if _is_alive(process)]
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
