from __future__ import annotations

import os
import time

from rlhf_core.engines.build_lock import clear_abandoned


def aged(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_lock_that_nobody_holds_is_removed_once_it_is_old(tmp_path):
    lock = tmp_path / "py311_cpu" / "shm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    aged(lock, 200)
    assert clear_abandoned(tmp_path) == [lock]
    assert not lock.exists()
    assert clear_abandoned(tmp_path) == []
    assert clear_abandoned(tmp_path / "none") == []


def test_a_young_lock_is_given_its_time(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    assert clear_abandoned(tmp_path, longest_build_seconds=0.3) == [lock]
    assert time.time() - tmp_path.stat().st_mtime < 60


def test_a_lock_that_is_held_stays(tmp_path):
    lock = tmp_path / "lock"
    with lock.open("w"):
        aged(lock, 1000)
        assert clear_abandoned(tmp_path) == []
        assert lock.exists()
