"""The lock of torch's extension builds: a process that is killed while it compiles leaves it, and torch waits for it for ever."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

#: A lock that no process here holds may belong to another host with the same home folder; a build takes less than this.
_LONGEST_BUILD_SECONDS = 120.0
_PAUSE_SECONDS = 0.5


def clear_abandoned(root: Path, longest_build_seconds: float = _LONGEST_BUILD_SECONDS) -> list[Path]:
    """Remove the locks below ``root`` that nobody can give back any more; returns which. Waits for those that may be held."""
    removed = []
    for lock in sorted(root.rglob("lock")):
        while (age := _age(lock)) is not None and not _is_held(lock):
            if age > longest_build_seconds:
                lock.unlink(missing_ok=True)
                removed.append(lock)
                break
            time.sleep(_PAUSE_SECONDS)
    return removed


def _age(lock: Path) -> float | None:
    try:
        return time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None


def _is_held(lock: Path) -> bool:
    """Whether a process of this host has it open, as torch does while it builds."""
    for process in psutil.process_iter():
        try:
            if any(Path(file.path) == lock for file in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue  # it ended, or is another user's: its lock would not be below our folder
    return False
