"""Devices for a run that waits for them, from runs that nobody drives any more."""

from __future__ import annotations

import time

from prefect.logging import get_run_logger

from infra.placement import holders, release
from rlhf_core.actors.group import kill
from rlhf_core.actors.leftovers import named_actors
from rlhf_core.config import RunConfig
from rlhf_core.errors import RunLocked
from rlhf_core.lease import Holder, Lease, lease_state
from tasks.context import RunStore, open_run_store
from tasks.names import namespace_of

#: A run that ended without finishing keeps its actors for so long, whoever waits: resuming is quick then.
_GRACE_SECONDS = 60.0


def make_room(config: RunConfig) -> None:
    """End the actors of other runs of this store that hold devices and that nobody has driven for a while.

    A run whose reward raised, or whose driver was killed, has such actors. Nothing committed is lost with them: who resumes it
    gets new ones, restored from its newest checkpoint. Runs in other stores cannot be judged from here and stay.
    """
    store, namespace = open_run_store(config), namespace_of(config.storage.url)
    for name in holders():
        place, _, run = name.partition("/")
        if place == namespace and run != config.run_id and _is_left(store, run):
            _end(store, run, namespace, name)


def _is_left(store: RunStore, run: str) -> bool:
    state = lease_state(store, run)
    return state is not None and time.time() - state.last_seen >= _GRACE_SECONDS


def _end(store: RunStore, run: str, namespace: str, reservation: str) -> None:
    try:
        with Lease.acquire(store, run, Holder.current()):  # so that nobody begins to drive it meanwhile
            get_run_logger().warning(
                "nobody drives run %s: its actors end, and this run takes their devices. What it committed stays: "
                "rlhf resume %s",
                run,
                run,
            )
            kill(named_actors(run, namespace), namespace)
            release(reservation)
    except RunLocked:
        return  # it has a driver
