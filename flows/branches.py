"""Reruns and forks as flows, for deployments with a form; the command line calls the same functions."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from flows.train_rlhf import train_rlhf
from rlhf_core.config import RunConfig
from rlhf_core.manifests import RunSummary
from tasks.branching import fork, rerun
from tasks.cluster import stop_actors

Stage = Literal["generate", "score", "advantages", "update", "sync"]

_STORE = ".rlhf/store"


def _stop_rerun(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancelling ends the run's actors too; they would outlive it."""
    _stop(flow_run, flow_run.parameters["run"])


def _stop_fork(flow: Any, flow_run: Any, state: Any) -> None:
    """As for a rerun."""
    given = flow_run.parameters
    _stop(flow_run, given.get("new_run") or _fork_name(given["run"], flow_run.id))


def _stop(flow_run: Any, run: str) -> None:
    stop_actors(RunConfig.model_validate({"run": run, "storage": {"url": flow_run.parameters.get("store", _STORE)}}))


def _fork_name(run: str, identity: object) -> str:
    """Name of a fork that was given none. The parent may be an older revision; its fork is a run of its own."""
    return f"{run.replace('~', '-')[:40]}-fork-{str(identity)[:8]}"


@task(name="start-revision", persist_result=False, cache_policy=NO_CACHE)
def start_rerun(store: str, run: str, iteration: int, stage: str, request: str) -> RunConfig:
    """Make the new revision; asked again by the same flow run, it changes nothing."""
    return rerun(store, run, iteration, stage, request)


@task(name="start-fork", persist_result=False, cache_policy=NO_CACHE)
def start_fork(store: str, run: str, iteration: int, stage: str, name: str, overrides: list[str]) -> RunConfig:
    """Make the new run; asked again with the same words, it changes nothing."""
    return fork(store, run, iteration, stage, name, overrides)


@flow(
    name="rerun-rlhf",
    flow_run_name="{run}-rerun-it{iteration}-{from_stage}",
    persist_result=False,
    on_cancellation=[_stop_rerun],
)
def rerun_rlhf(run: str, iteration: int, from_stage: Stage, store: str = _STORE) -> RunSummary:
    """Redo a stage of a run and everything that depends on it, as a new revision of the run.

    Args:
        run: name of the run.
        iteration: number of the iteration, from 0.
        from_stage: the first stage to redo.
        store: where the run is: a folder or s3://bucket/prefix.
    """
    request = str(flow_run.get_id())  # Retry is the same flow run, and must not make another revision
    return train_rlhf(start_rerun(store, run, iteration, from_stage, request))


@flow(
    name="fork-rlhf",
    flow_run_name="{run}-fork-it{iteration}-{from_stage}",
    persist_result=False,
    on_cancellation=[_stop_fork],
)
def fork_rlhf(
    run: str,
    iteration: int,
    from_stage: Stage,
    new_run: str | None = None,
    overrides: list[str] | None = None,
    store: str = _STORE,
) -> RunSummary:
    """Start a new run that shares what another one has committed before a stage.

    Args:
        run: name of the run to go on from.
        iteration: number of the iteration, from 0.
        from_stage: the first stage of the new run's own.
        new_run: name of the new run; made if left out.
        overrides: settings that differ from there on, as section.key=value.
        store: where the run is: a folder or s3://bucket/prefix.
    """
    name = new_run or _fork_name(run, flow_run.get_id())
    return train_rlhf(start_fork(store, run, iteration, from_stage, name, overrides or []))
