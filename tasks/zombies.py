"""Flow and task runs of drivers that were killed: Prefect shows them as running until somebody says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterParentTaskRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterId,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Crashed

from rlhf_core.config import RunConfig
from rlhf_core.errors import UserError
from tasks.names import namespace_of

_MESSAGE = "its process is gone: a later driver of the run holds the lease"
_ALIVE = [StateType.RUNNING, StateType.CANCELLING]
_WAITING = [*_ALIVE, StateType.PENDING]
#: States of a flow run whose process is gone or was killed. One that has ended by itself has told all states of its task runs,
#: though the server may still be about to hear them.
_KILLED = [*_ALIVE, StateType.CRASHED, StateType.CANCELLED]


def end_zombies(config: RunConfig) -> int:
    """Mark what earlier drivers of the run left as running as crashed; returns how many flow and task runs that were.

    Those are their trainings and iterations in the run's store, reruns and forks that called these, and the task runs of all of
    them; also the task runs that an earlier process left in the flow run of this driver, which somebody has retried. Only for the
    holder of the run's lease: all other drivers are dead, or stop at their next look at it. The state has a name of its own, so
    that no automation starts them again.
    """
    run = _Run(config.run_id, namespace_of(config.storage.url))
    with get_client(sync_client=True) as client:
        mine = _mine(client)
        flows = [f for f in _flow_runs(client, run) if f.id not in mine.flows]
        callers = [f for f in _callers(client, run, mine) if f.id not in mine.flows]
        tasks = _task_runs(client, run, [*callers, *mine.flows.values()], mine)
        for dead in (*flows, *callers):
            client.set_flow_run_state(dead.id, _replaced(), force=True)
        for task in tasks:
            client.set_task_run_state(task.id, _replaced(), force=True)
    ended = len(flows) + len(callers) + len(tasks)
    if ended:
        get_run_logger().info(
            "marked %d flow runs and %d task runs of killed drivers as crashed", len(flows) + len(callers), len(tasks)
        )
    return ended


@dataclass(frozen=True)
class _Run:
    """A run's name, and the namespace of its store: runs of one name in two stores are two runs."""

    name: str
    namespace: str

    def has(self, flow: FlowRun) -> bool:
        """Whether a flow run is a training of this run or one of its iterations; ``like`` finds parts of names too."""
        is_named = flow.name == self.name or flow.name.removeprefix(f"{self.name}-it").isdigit()
        return is_named and self._has_store(flow.parameters)

    def _has_store(self, parameters: Mapping[str, Any]) -> bool:
        config = parameters.get("config")
        url = config.get("storage", {}).get("url") if isinstance(config, Mapping) else None
        try:
            return url is None or namespace_of(url) == self.namespace
        except (UserError, ValueError):  # a store that nobody here can open
            return False


@dataclass(frozen=True)
class _Mine:
    """The flow run of this driver and those that called it, by id, and the task runs that stand for calls between them."""

    flows: dict[UUID, FlowRun]
    calls: frozenset[UUID]


def _mine(client: SyncPrefectClient) -> _Mine:
    flows: dict[UUID, FlowRun] = {}
    calls: set[UUID] = set()
    identity: UUID | None = UUID(str(flow_run.get_id()))
    while identity is not None:
        found = client.read_flow_run(identity)
        flows[found.id] = found
        identity = None
        if found.parent_task_run_id is not None:
            calls.add(found.parent_task_run_id)
            identity = client.read_task_run(found.parent_task_run_id).flow_run_id
    return _Mine(flows, frozenset(calls))


def _flow_runs(client: SyncPrefectClient, run: _Run) -> list[FlowRun]:
    """Trainings and iterations of the run that show as running."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(name=FlowRunFilterName(like_=run.name), state=_flow_state(_ALIVE))
    )
    return [f for f in found if run.has(f)]


def _callers(client: SyncPrefectClient, run: _Run, mine: _Mine) -> list[FlowRun]:
    """Reruns and forks that show as running, though the training that they called is dead: they share its process."""
    trainings = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            name=FlowRunFilterName(any_=[run.name]),
            state=_flow_state([*_ALIVE, StateType.CRASHED]),
            parent_task_run_id=FlowRunFilterParentTaskRunId(is_null_=False),
        )
    )
    dead = [t for t in trainings if run.has(t) and t.id not in mine.flows]
    calls = [t.parent_task_run_id for t in dead if t.parent_task_run_id is not None]
    if not calls:
        return []
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=_flow_state(_ALIVE)),
        task_run_filter=TaskRunFilter(id=TaskRunFilterId(any_=calls)),
    )


def _task_runs(client: SyncPrefectClient, run: _Run, others: Iterable[FlowRun], mine: _Mine) -> list[TaskRun]:
    """Task runs that show as running or about to run in the run's flow runs that were killed, and in the others."""
    unfinished = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_WAITING), name=None))
    ids = [other.id for other in others]
    killed = FlowRunFilter(name=FlowRunFilterName(like_=run.name), state=_flow_state(_KILLED))
    found = [
        task
        for where in (killed, FlowRunFilter(id=FlowRunFilterId(any_=ids)))
        for task in client.read_task_runs(flow_run_filter=where, task_run_filter=unfinished)
    ]
    within = {task.flow_run_id for task in found if task.flow_run_id is not None}
    flows = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(within)))) if found else []
    theirs = {f.id for f in flows if run.has(f)} | set(ids)
    return [t for t in {t.id: t for t in found}.values() if t.flow_run_id in theirs and not _runs_here(t, mine)]


def _runs_here(task: TaskRun, mine: _Mine) -> bool:
    """Whether the task run belongs to this process, and not to one before the flow run was retried."""
    if task.id in mine.calls:
        return True
    flow = mine.flows.get(task.flow_run_id) if task.flow_run_id is not None else None
    return flow is not None and task.flow_run_run_count >= flow.run_count


def _replaced() -> State[None]:
    return Crashed(name="Replaced", message=_MESSAGE)


def _flow_state(states: list[StateType]) -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=states))
