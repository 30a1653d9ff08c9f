"""Leases where clocks differ and jump, over every object store."""

from __future__ import annotations

import time

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.errors import RunLocked
from rlhf_core.lease import Claim, Heartbeat, Holder, Lease, lease_state
from rlhf_core.records import canonical, commit_record, seal

RUN = "run-1"
ME = Holder.current()
ELSEWHERE = Holder(host="another-host", pid=1, process_start=0.0, user="ann")
HOUR = 3600.0


def claim(store, holder=ELSEWHERE, seen=0.0, ttl=60.0):
    """A claim as another driver would have left it: last heartbeat ``seen`` seconds ago by our clock."""
    at = time.time() - seen
    record = Claim(run=RUN, epoch=1, holder=holder, token="t1", acquired_at=at, ttl_seconds=ttl)
    commit_record(store, layout.lease(RUN, 1), record)
    beat = seal(Heartbeat(epoch=1, token="t1", counter=1, at=at))
    store.put(layout.heartbeat(RUN, 1), canonical(beat.model_dump(mode="json")))


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_clock_that_jumps_on_this_host_does_not_make_a_living_holder_dead(store, hours):
    """The kernel computes start times from its boot time, which moves when the clock is set."""
    holder = ME.model_copy(update={"process_start": ME.process_start + hours * HOUR})
    claim(store, holder=holder, seen=0)
    with pytest.raises(RunLocked, match=f"pid {ME.pid}"):
        Lease.acquire(store, RUN, ELSEWHERE.model_copy(update={"host": ME.host}))


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_living_holder_whose_clock_jumps_keeps_its_run(tmp_path, hours, monkeypatch):
    store = LocalObjectStore(tmp_path)
    with Lease.acquire(store, RUN, ME, ttl_seconds=1.0) as lease:
        before = lease_state(store, RUN).last_seen
        monkeypatch.setattr("rlhf_core.lease._wall_clock", lambda: time.time() + hours * HOUR)
        while abs(lease_state(store, RUN).last_seen - before) < HOUR:  # until it has beaten by the new clock
            lease.check()
        monkeypatch.undo()
        with pytest.raises(RunLocked, match=f"pid {ME.pid}"):
            Lease.acquire(store, RUN, ELSEWHERE)
        lease.check()


def test_a_dead_holder_whose_clock_was_ahead_does_not_block_the_run(store):
    claim(store, seen=-24 * HOUR, ttl=0.3)
    with Lease.acquire(store, RUN, ME) as lease:
        assert lease.epoch == 2


def test_a_clock_that_is_a_little_ahead_blocks_for_a_little_longer(store):
    claim(store, seen=-5, ttl=60)
    with pytest.raises(RunLocked, match="try again in 60 s"):
        Lease.acquire(store, RUN, ME)


@pytest.mark.parametrize(("hours", "lives"), [(0, True), (-24, False)])
def test_claims_of_older_releases_know_the_holder_by_the_clock(store, hours, lives):
    claim(store, holder=ME.model_copy(update={"started": "", "process_start": ME.process_start + hours * HOUR}))
    if lives:
        with pytest.raises(RunLocked, match=f"pid {ME.pid}"):
            Lease.acquire(store, RUN, ME)
    else:
        with Lease.acquire(store, RUN, ME) as lease:
            assert lease.epoch == 2
