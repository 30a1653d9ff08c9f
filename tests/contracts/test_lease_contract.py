"""One driver per run, over every object store: races, takeover, fencing, crashed holders."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.errors import FencedOut, RunLocked
from rlhf_core.lease import Claim, Heartbeat, Holder, Lease, lease_state
from rlhf_core.records import canonical, commit_record, seal
from tests.fixtures.processes import ending

ROOT = Path(__file__).parents[2]
RUN = "run-1"
ME = Holder.current()
ELSEWHERE = Holder(host="another-host", pid=1, process_start=0.0, user="ann")


def claim(store, epoch=1, holder=ELSEWHERE, seen=0.0, ttl=60.0, released=False):
    """A claim as another driver would have left it: last heartbeat ``seen`` seconds ago."""
    at = time.time() - seen
    record = Claim(run=RUN, epoch=epoch, holder=holder, token=f"t{epoch}", acquired_at=at, ttl_seconds=ttl)
    commit_record(store, layout.lease(RUN, epoch), record)
    beat(store, epoch, 1, at, released)


def beat(store, epoch, counter, at, released=False):
    record = seal(Heartbeat(epoch=epoch, token=f"t{epoch}", counter=counter, at=at, released=released))
    store.put(layout.heartbeat(RUN, epoch), canonical(record.model_dump(mode="json")))


def test_acquire_check_release(store):
    assert lease_state(store, RUN) is None
    with Lease.acquire(store, RUN, ME) as lease:
        lease.check()
        assert lease.epoch == 1
        state = lease_state(store, RUN)
        assert state.claim == lease.claim
        assert state.claim.holder == ME
        assert not state.released
    assert lease_state(store, RUN).released
    with pytest.raises(FencedOut, match="released"):
        lease.check()
    lease.release()
    with Lease.acquire(store, RUN, ME) as second:  # at once
        assert second.epoch == 2
        assert second.token > lease.token
    with Lease.acquire(store, "run-2", ME) as other:
        assert other.epoch == 1


def test_living_holder_is_named(store):
    with Lease.acquire(store, RUN, ME) as lease:
        with pytest.raises(RunLocked) as caught:
            Lease.acquire(store, RUN, ME)
        message = str(pickle.loads(pickle.dumps(caught.value)))
        for part in (RUN, ME.host, f"pid {ME.pid}", f"kill {ME.pid}", "since 2", "last heartbeat 2", "try again in"):
            assert part in message
        lease.check()


def test_holder_elsewhere_blocks_until_it_expires(store):
    claim(store, seen=10)
    with pytest.raises(RunLocked, match=r"ann@another-host pid 1 .* try again in (\d+) s") as locked:
        Lease.acquire(store, RUN, ME)
    assert 0 < int(str(locked.value).rpartition("try again in ")[2].split()[0]) <= 50


def test_released_holder_elsewhere_is_replaced(store):
    claim(store, released=True)
    with Lease.acquire(store, RUN, ME) as lease:
        assert lease.epoch == 2


def test_expired_holder_elsewhere_is_replaced(store):
    claim(store, seen=100, ttl=0.3)
    with Lease.acquire(store, RUN, ME) as lease:
        assert lease.epoch == 2


def test_claim_without_a_heartbeat_expires_too(store):
    claim(store, seen=100, ttl=0.3)
    store.delete([layout.heartbeat(RUN, 1)])
    with Lease.acquire(store, RUN, ME) as lease:
        assert lease.epoch == 2


@pytest.mark.parametrize("holder", [ELSEWHERE, ME], ids=["elsewhere", "here"])
def test_old_heartbeat_of_a_living_holder_does_not_cost_it_the_run(store, holder):
    claim(store, holder=holder, seen=1000, ttl=6.0)  # its clock is behind ours, or the store was away for long
    stop = threading.Event()

    def keep():
        counter = 1
        while not stop.is_set():
            counter += 1
            beat(store, 1, counter, time.time() - 1000)

    beating = threading.Thread(target=keep)
    beating.start()
    try:
        with pytest.raises(RunLocked, match=holder.host):
            Lease.acquire(store, RUN, ME)
    finally:
        stop.set()
        beating.join()


def test_dead_process_on_this_host_is_replaced_at_once(store):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    start = time.time()
    gone.wait()
    claim(store, holder=Holder(host=ME.host, pid=gone.pid, process_start=start, user="me"))
    with Lease.acquire(store, RUN, ME) as lease:
        assert lease.epoch == 2


def test_reused_process_id_is_not_the_holder(store):
    boot, _, ticks = ME.started.partition(" ")
    for other in (f"{boot} {int(ticks) - 1}", f"another-boot {ticks}"):
        claim(store, epoch=1, holder=ME.model_copy(update={"started": other}))
        with Lease.acquire(store, RUN, ME) as lease:
            assert lease.epoch == 2
        store.delete(store.list("runs"))


def test_holder_is_fenced_out_by_a_newer_epoch(store):
    with Lease.acquire(store, RUN, ME) as lease:
        lease.check()
        claim(store, epoch=2)
        with pytest.raises(FencedOut, match=r"ann@another-host pid 1 \(epoch 2\) took over from epoch 1"):
            lease.check()
        with pytest.raises(FencedOut, match="took over"):
            lease.check()


def test_newest_epoch_is_found_among_many(store):
    for epoch in range(1, 12):
        claim(store, epoch=epoch, released=True)
    assert lease_state(store, RUN).claim.epoch == 11
    with Lease.acquire(store, RUN, ME) as lease:
        assert lease.epoch == 12


def test_threads_race_for_one_expired_run(store):
    claim(store, released=True)
    barrier = threading.Barrier(6)

    def attempt(_):
        barrier.wait()
        try:
            return Lease.acquire(store, RUN, ME)
        except RunLocked as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attempt, range(6)))
    leases = [result for result in results if isinstance(result, Lease)]
    try:
        assert [lease.epoch for lease in leases] == [2]
        leases[0].check()
    finally:
        for lease in leases:
            lease.release()


class Cut(LocalObjectStore):
    """A store that can be cut off, as by a network."""

    down = False

    def _path(self, key):
        if self.down:
            raise OSError("cut off")
        return super()._path(key)


class Unwritable(LocalObjectStore):
    """A store that takes nothing any more."""

    def put(self, key, data):
        raise OSError("disk is full")


class Hooked(LocalObjectStore):
    """Runs ``hook`` once, right before the call ``method`` on ``key`` for the ``nth`` time."""

    method, key, nth, hook = "", "", 1, None

    def before(self, method, key, hook, nth=1):
        self.method, self.key, self.hook, self.nth = method, key, hook, nth

    def _came(self, method, key):
        if self.hook is not None and (method, key) == (self.method, self.key):
            self.nth -= 1
            if self.nth == 0:
                hook, self.hook = self.hook, None
                hook()

    def create(self, key, data):
        self._came("create", key)
        return super().create(key, data)

    def exists(self, key):
        self._came("exists", key)
        return super().exists(key)

    def get(self, key):
        self._came("get", key)
        return super().get(key)


TTL = 0.2


def silent_holder(store):
    """A lease whose heartbeats have been missing for longer than its ttl; only ``check`` can write."""
    lease = Lease.acquire(store, RUN, ME, ttl_seconds=TTL, beats=Unwritable(store.root))
    while time.time() - lease_state(store, RUN).last_seen <= TTL:
        pass
    return lease


def test_silent_holder_goes_on_while_nobody_took_over(tmp_path, caplog):
    store = LocalObjectStore(tmp_path)
    lease = silent_holder(store)
    silent_since = lease_state(store, RUN).last_seen
    while (
        lease_state(store, RUN).beat is None
    ):  # until the last sign of life is older than the ttl by the lease's own clock
        lease.check()
    assert lease_state(store, RUN).last_seen >= silent_since + TTL  # a check wrote a heartbeat
    lease.release()
    beats = [record for record in caplog.records if "heartbeats of the lease fail" in record.getMessage()]
    assert len(beats) == 1  # not one a beat


def test_holder_outlives_an_outage_longer_than_its_ttl(tmp_path):
    store = Cut(tmp_path)
    with Lease.acquire(store, RUN, ME, ttl_seconds=1.0) as lease:
        while (seen := lease_state(store, RUN)).beat is None:
            pass
        store.down = True
        while time.time() - seen.last_seen <= 2.0:
            with pytest.raises(OSError, match="cut off"):
                lease.check()
        store.down = False
        lease.check()
        with pytest.raises(RunLocked):
            Lease.acquire(store, RUN, ELSEWHERE)
        lease.check()


def test_holder_that_cannot_write_its_heartbeat_is_told(tmp_path):
    store = LocalObjectStore(tmp_path)
    lease = silent_holder(store)
    lease.store = Unwritable(tmp_path)
    with pytest.raises(OSError, match=r"no heartbeat could be written to .* the lease lasts 0.2 s: disk is full"):
        lease.check()
    claim(store, epoch=2)
    with pytest.raises(FencedOut, match=r"another-host pid 1 \(epoch 2\) took over"):
        lease.check()
    lease.release()


@pytest.mark.parametrize("rival", [ELSEWHERE, ME], ids=["elsewhere", "here"])
def test_rival_sees_the_heartbeat_that_breaks_the_silence(tmp_path, rival):
    holder = silent_holder(Hooked(tmp_path))
    theirs = Hooked(tmp_path)
    theirs.before("get", layout.heartbeat(RUN, 1), holder.check, nth=2)  # after it was seen as expired
    with pytest.raises(RunLocked, match=f"pid {ME.pid} "):
        Lease.acquire(theirs, RUN, rival)
    holder.check()
    holder.release()


def test_rival_that_has_looked_before_takes_over_and_the_holder_finds_out(tmp_path):
    holder = silent_holder(Hooked(tmp_path))
    theirs = Hooked(tmp_path)
    theirs.before("create", layout.lease(RUN, 2), holder.check)  # passes: nobody has taken over yet
    with Lease.acquire(theirs, RUN, ELSEWHERE) as rival:
        assert theirs.hook is None
        with pytest.raises(FencedOut, match=r"another-host pid 1 \(epoch 2\) took over from epoch 1"):
            holder.check()
        rival.check()
    holder.release()


def test_rival_that_comes_between_heartbeat_and_look_is_seen(tmp_path):
    ours = Hooked(tmp_path)
    holder = silent_holder(ours)
    rivals = []
    theirs = LocalObjectStore(tmp_path)
    # The rival has watched before: the holder's heartbeat of this moment comes too late for it.
    ours.before("exists", layout.lease(RUN, 2), lambda: rivals.append(claim(theirs, epoch=2)))
    with pytest.raises(FencedOut, match=r"\(epoch 2\) took over"):
        holder.check()
    assert len(rivals) == 1
    holder.release()


def test_silent_holder_and_rivals_at_the_same_time(tmp_path):
    def attempt(work, barrier):
        barrier.wait()
        try:
            return work()
        except (FencedOut, RunLocked):
            return None

    for number in range(12):
        store = LocalObjectStore(tmp_path / str(number))
        holder = silent_holder(store)
        barrier = threading.Barrier(3)
        rivals = [lambda s=store: Lease.acquire(s, RUN, ELSEWHERE, ttl_seconds=60.0)] * 2
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(attempt, work, barrier) for work in (*rivals, holder.check)]
            leases = [holder, *(lease for job in jobs if (lease := job.result()) is not None)]
        passed = [
            lease.epoch for lease in leases if attempt(lambda one=lease: one.check() or True, threading.Barrier(1))
        ]
        assert passed == [lease_state(store, RUN).claim.epoch]
        for lease in leases:
            lease.release()


def test_store_failure_is_not_taken_for_fencing(tmp_path):
    store = Cut(tmp_path)
    lease = Lease.acquire(store, RUN, ME)
    store.down = True
    with pytest.raises(OSError, match="cut off"):
        lease.check()
    store.down = False
    lease.check()
    lease.release()


def test_failed_release_is_logged_and_expires(tmp_path, caplog):
    store = Cut(tmp_path)
    lease = Lease.acquire(store, RUN, ME)
    store.down = True
    lease.release()
    assert "could not be released" in caplog.text
    store.down = False
    assert not lease_state(store, RUN).released


def test_ttl_and_run_are_checked(tmp_path):
    store = LocalObjectStore(tmp_path)
    with pytest.raises(ValueError, match="ttl_seconds"):
        Lease.acquire(store, RUN, ME, ttl_seconds=0)
    with pytest.raises(ValueError, match="run id"):
        Lease.acquire(store, "../x", ME)


DRIVER = """
import json, sys
from infra.object_store import open_store
from rlhf_core.errors import FencedOut, RunLocked
from rlhf_core.lease import Holder, Lease
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    lease = Lease.acquire(store, "run-1", Holder.current(), float(sys.argv[2]))
except RunLocked as error:
    print(json.dumps({"locked": str(error)}), flush=True)
else:
    print(json.dumps({"epoch": lease.epoch}), flush=True)
    sys.stdin.readline()
    try:
        lease.check()
    except FencedOut as error:
        print(json.dumps({"fenced": str(error)}), flush=True)
    lease.release()
"""


@contextmanager
def drivers(store, count, ttl=60.0):
    """Processes that have just tried to take the lease, all at once."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, store.url, str(ttl)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    with ending(*started):
        for driver in started:
            assert driver.stdout.readline() == "ready\n"
        for driver in started:
            driver.stdin.write("go\n")
            driver.stdin.flush()
        yield started


def test_processes_race_and_a_killed_winner_is_replaced(store):
    with drivers(store, 3) as started:
        answers = [json.loads(driver.stdout.readline()) for driver in started]
        winner = next(driver for driver, answer in zip(started, answers, strict=True) if "epoch" in answer)
        assert sum("epoch" in answer for answer in answers) == 1
        assert all(f"pid {winner.pid} " in answer["locked"] for answer in answers if "locked" in answer)
        with pytest.raises(RunLocked, match=f"pid {winner.pid} "):
            Lease.acquire(store, RUN, ME)
        winner.send_signal(signal.SIGKILL)
        # It has ended, but nobody has reaped it: a zombie is no holder either.
        os.waitid(os.P_PID, winner.pid, os.WEXITED | os.WNOWAIT)
        with Lease.acquire(store, RUN, ME) as lease:
            assert lease.epoch == 2


def test_driver_that_hangs_past_its_ttl_is_fenced_when_it_wakes_up(store):
    with drivers(store, 1, ttl=1.0) as (driver,):
        assert json.loads(driver.stdout.readline()) == {"epoch": 1}
        driver.send_signal(signal.SIGSTOP)
        lease = None
        while lease is None:  # until it has expired
            try:
                lease = Lease.acquire(store, RUN, ME)
            except RunLocked:
                continue
        with lease:
            driver.send_signal(signal.SIGCONT)
            answer = driver.communicate("check\n", timeout=60)[0]
            assert f"pid {ME.pid} (epoch 2) took over from epoch 1" in json.loads(answer)["fenced"]
            lease.check()
