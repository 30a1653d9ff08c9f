"""Actors that compute on one thread only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.one_thread import on_one_thread
from rlhf_core.actors.rollout_actor import RolloutActor
from rlhf_core.actors.trainer_actor import TrainerActor
from rlhf_core.errors import FencedOut


@on_one_thread
class Worker(Fenced):
    def __init__(self, name: str, gate: threading.Event | None = None) -> None:
        super().__init__(name)
        self.gate = gate
        self.seen = [threading.get_ident()]

    def work(self, epoch: int) -> int:
        """Looks at the epoch, as the real ones do, and waits where it is told to."""
        self.require_epoch(epoch)
        self.seen.append(threading.get_ident())
        if self.gate is not None:
            assert self.gate.wait(10)
        return len(self.seen)

    def broken(self) -> None:
        raise ValueError("as it is")


def test_construction_and_all_calls_share_a_thread_whoever_calls():
    worker = Worker("w")
    with ThreadPoolExecutor(3) as callers:
        assert sorted(callers.map(worker.work, [0] * 6)) == list(range(2, 8))
    assert len(set(worker.seen)) == 1
    assert worker.seen[0] != threading.get_ident()
    assert worker.work.__doc__.startswith("Looks at")


def test_errors_come_out_as_they_are():
    worker = Worker("w")
    with pytest.raises(ValueError, match="as it is"):
        worker.broken()
    with pytest.raises(FencedOut):
        worker.work(1)
    with pytest.raises(TypeError, match="name"):
        Worker()


def test_claims_and_status_answer_while_a_call_works():
    gate = threading.Event()
    worker = Worker("w", gate)
    with ThreadPoolExecutor(1) as callers:
        call = callers.submit(worker.work, 0)
        while len(worker.seen) < 2:
            assert not call.done()
        assert worker.claim(3)["epoch"] == 3
        assert worker.status()["epoch"] == 3
        assert not call.done()
        gate.set()
        assert call.result(10) == 2


@pytest.mark.parametrize("actor", [RolloutActor, TrainerActor])
def test_the_actors_that_compute_are_such(actor):
    public = {name for name in dir(actor) if not name.startswith("_") and callable(getattr(actor, name))}
    hosted = {name for name in public if hasattr(getattr(actor, name), "__wrapped__")}
    assert public - hosted == {"claim", "pulse", "status"}
    assert hasattr(actor.__init__, "__wrapped__")
