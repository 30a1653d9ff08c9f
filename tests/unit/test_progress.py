"""What a worker counts, and what its pulse says."""

from __future__ import annotations

import threading

import pytest

from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.watched_store import WatchedStore
from rlhf_core.errors import FencedOut
from rlhf_core.ports import ObjectStore
from rlhf_core.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock) -> Progress:
    return Progress(clock)


def step(progress, clock, seconds, unit="micro-batch"):
    clock.now += seconds
    progress.count(unit)


def test_nobody_has_called(progress):
    assert progress.pulse().doing is None
    with progress.call("update"):
        assert progress.pulse().doing == "update"
    assert progress.pulse().doing is None


def test_everything_moves_the_count(progress, clock):
    counts = [progress.pulse().count]

    def look():
        counts.append(progress.pulse().count)

    with progress.call("update"):
        look()
        step(progress, clock, 1)
        look()
        with progress.waiting("the object store"):
            look()
        look()
    look()
    assert counts == sorted(set(counts)), "each is larger than the one before"


def test_steps_are_known_by_call_and_unit(progress, clock):
    with progress.call("update"):
        assert progress.pulse().longest is None, "never done"
        step(progress, clock, 30)
        assert progress.pulse().doing == "update, after 1 x micro-batch"
        assert progress.pulse().longest is None, "the first step is another kind than those that follow"
        step(progress, clock, 4)
        assert progress.pulse().longest == 4
        step(progress, clock, 2)
        assert progress.pulse().longest == 4
        assert progress.pulse().doing == "update, after 3 x micro-batch"
        step(progress, clock, 1, "optimizer step")
        assert progress.pulse().longest is None
        assert progress.pulse().doing == "update, after 1 x optimizer step"
        clock.now += 7
    with progress.call("experience"):
        assert progress.pulse().longest is None
    with progress.call("update"):
        assert progress.pulse().longest == 30
        step(progress, clock, 1, "optimizer step")
        assert progress.pulse().longest == 7, "to the end of the call"


def test_waits_are_no_steps(progress, clock):
    with progress.call("score"):
        with progress.waiting("the reward functions", 60):
            pulse = progress.pulse()
            assert (pulse.waiting, pulse.at_most) == ("the reward functions", 60)
            clock.now += 50
        assert progress.pulse().waiting is None
        assert progress.pulse().longest is None, "a wait says nothing about how long the step takes"
        step(progress, clock, 3, "batch")
    with progress.call("score"):
        assert progress.pulse().longest == 3


def test_several_threads_wait(progress):
    with progress.call("advantages"):
        first = progress.waiting("the object store")
        first.__enter__()
        with progress.waiting("the object store"):
            pass
        assert progress.pulse().waiting == "the object store"
        first.__exit__(None, None, None)
        assert progress.pulse().waiting is None


class Worker(Fenced):
    def outer(self, epoch: int) -> str | None:
        self.inner(epoch)
        return self.progress.pulse().doing

    def inner(self, epoch: int) -> str | None:
        return self.progress.pulse().doing

    def broken(self, epoch: int) -> None:
        raise ValueError("as it is")

    def status(self):
        return super().status() | {"doing": self.progress.pulse().doing}


def test_calls_of_an_actor_are_noted():
    worker = Worker("w")
    assert worker.inner(0) == "inner"
    assert worker.outer(0) == "outer", "what an actor calls itself is part of the call"
    with pytest.raises(ValueError, match="as it is"):
        worker.broken(0)
    assert worker.status()["doing"] is None, "and control calls are not"
    assert worker.pulse(0).doing is None
    worker.claim(2)
    with pytest.raises(FencedOut):
        worker.pulse(1)


def test_the_store_is_waited_for(progress, tmp_path):
    from infra.object_store import LocalObjectStore

    seen = []

    class Slow(LocalObjectStore):
        def get(self, key):
            seen.append(progress.pulse().waiting)
            return super().get(key)

    store = WatchedStore(Slow(str(tmp_path)), progress)
    assert isinstance(store, ObjectStore)
    with progress.call("score"):
        store.put("a/b", b"x")
        assert store.create("a/b", b"y") is False
        assert store.get("a/b") == b"x"
        assert store.exists("a/b")
        assert (store.list("a"), store.folders("")) == (["a/b"], ["a"])
        store.get_file("a/b", str(tmp_path / "copy"))
        store.put_file("a/c", str(tmp_path / "copy"))
        store.delete(["a/b"])
        with pytest.raises(FileNotFoundError):
            store.get("a/b")
        assert store.list("a") == ["a/c"]
        assert seen == ["the object store"] * 2
        assert progress.pulse().waiting is None
    assert store.url == str(tmp_path)


def test_counting_from_many_threads(progress):
    threads = [threading.Thread(target=lambda: [progress.count("x") for _ in range(1000)]) for _ in range(4)]
    with progress.call("c"):
        before = progress.pulse().count
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert progress.pulse().count == before + 4000
