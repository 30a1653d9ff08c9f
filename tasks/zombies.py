"""Flow runs of drivers that were killed: Prefect shows them as running until somebody says otherwise."""

from __future__ import annotations

from prefect import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Crashed

_MESSAGE = "its process is gone: a later driver of the run holds the lease"


def end_zombies(run: str) -> int:
    """Mark what earlier drivers of the run left as running as crashed; returns how many flow runs that were.

    Only for the holder of the run's lease: all other drivers are dead, or stop at their next look at it. The state has a name of
    its own, so that no automation starts them again.
    """
    mine = str(flow_run.get_id())
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                name=FlowRunFilterName(like_=run),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING])),
            )
        )
        dead = [other for other in found if str(other.id) != mine and _is_of(other, run)]
        for other in dead:
            client.set_flow_run_state(other.id, Crashed(name="Replaced", message=_MESSAGE), force=True)
    if dead:
        get_run_logger().info("marked %d flow runs of killed drivers as crashed", len(dead))
    return len(dead)


def _is_of(other: FlowRun, run: str) -> bool:
    """Whether the flow run is a training of this run or one of its iterations; ``like`` finds parts of names too."""
    return other.name == run or other.name.removeprefix(f"{run}-it").isdigit()
