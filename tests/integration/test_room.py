"""Runs that wait for devices, and runs that hold some though nobody drives them, on real Ray."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from infra.object_store import open_store
from infra.placement import plan_bundles, release, reserve
from rlhf_core.actors.group import ActorSpec, create, kill
from rlhf_core.actors.leftovers import is_reserved, named_actors
from rlhf_core.config import parse_config
from rlhf_core.lease import Holder, Lease
from tasks import room
from tasks.cluster import reservation_name
from tasks.names import namespace_of

#: All of the cluster.
PLAN = plan_bundles(trainers=1, engines=1, tensor_parallel=1, gpu=False, colocate=False)
SECONDS = 60.0


@pytest.fixture
def run(tmp_path):
    """Function: (name, folder of the store) -> configuration of a run."""

    def make(name, store="store"):
        return parse_config({"run": name, "storage": {"url": str(tmp_path / store)}})

    return make


@pytest.fixture
def hold(ray_of_two_cores, failing_actors):
    """Function: configuration -> the run holds all devices, with one actor; given back with the test."""
    held = []

    def take(config):
        reserve(PLAN, reservation_name(config), SECONDS)
        held.append(config)
        create(
            [ActorSpec(f"{config.run}-engine-0", failing_actors.FailingActor, ("",), {"num_cpus": 0})],
            namespace_of(config.storage.url),
        )

    yield take
    for config in held:
        kill(named_actors(config.run, namespace_of(config.storage.url)), namespace_of(config.storage.url))
        release(reservation_name(config))


@pytest.fixture(autouse=True)
def plain_log(monkeypatch):
    """There is no flow run to log to."""
    monkeypatch.setattr(room, "get_run_logger", lambda: logging.getLogger("room"))


def drive(config):
    """Become the driver of a run; the lease has to be released."""
    store = open_store(config.storage.url)
    return Lease.acquire(store, config.run, Holder.current())


def holds(config):
    return is_reserved(reservation_name(config)) and named_actors(config.run, namespace_of(config.storage.url)) != []


def test_a_waiting_run_gets_the_devices_of_one_that_nobody_drives(run, hold, monkeypatch):
    failed, waiting = run("failed"), run("waiting")
    hold(failed)
    drive(failed).release()
    monkeypatch.setattr(room, "_GRACE_SECONDS", 0.0)
    try:
        group = reserve(PLAN, reservation_name(waiting), SECONDS, partial(room.make_room, waiting))
        assert group.wait(timeout_seconds=SECONDS)
        assert not holds(failed)
        assert not is_reserved(reservation_name(failed))
        drive(failed).release()  # it may be driven again
    finally:
        release(reservation_name(waiting))


def test_who_has_a_driver_keeps_its_devices(run, hold, monkeypatch):
    living, waiting = run("living"), run("waiting")
    hold(living)
    monkeypatch.setattr(room, "_GRACE_SECONDS", 0.0)
    with drive(living) as lease:
        room.make_room(waiting)
        assert holds(living)
        lease.check()


def test_who_has_just_ended_keeps_them_for_a_while(run, hold):
    failed, waiting = run("failed"), run("waiting")
    hold(failed)
    drive(failed).release()
    room.make_room(waiting)
    assert holds(failed)


def test_runs_that_cannot_be_judged_from_here_keep_them(run, hold, monkeypatch):
    elsewhere = run("failed", store="another")
    hold(elsewhere)
    drive(elsewhere).release()
    monkeypatch.setattr(room, "_GRACE_SECONDS", 0.0)
    room.make_room(run("waiting"))
    assert holds(elsewhere)


def test_a_run_does_not_end_itself(run, hold, monkeypatch):
    failed = run("failed")
    hold(failed)
    drive(failed).release()
    monkeypatch.setattr(room, "_GRACE_SECONDS", 0.0)
    room.make_room(failed)
    assert holds(failed)
