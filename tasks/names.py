"""Names of runs and of what Prefect shows."""

from __future__ import annotations

from prefect.runtime import flow_run

from infra.object_store import open_store
from infra.placement import PREFIX
from rlhf_core.config import RunConfig
from rlhf_core.records import digest

_DIGITS = 8


def named(config: RunConfig, identity: object = None) -> RunConfig:
    """The configuration with a run name. One that is made here comes from the flow run, so that Retry continues it.

    ``identity``: id of the flow run, where it is not the one that runs here.
    """
    if config.run is not None:
        return config
    return config.model_copy(update={"run": _made_name(identity or flow_run.get_id())})


def namespace_of(store_url: str) -> str:
    """Ray namespace of the runs of a store. Runs of one name in two stores are two runs, also on one cluster."""
    return PREFIX + digest(open_store(store_url).url.encode())[:_DIGITS]


def training_run_name() -> str:
    """Name of the flow run: the run's, where the user gave one."""
    config = flow_run.get_parameters().get("config")
    run = config.run if isinstance(config, RunConfig) else (config or {}).get("run")
    return run or _made_name(flow_run.get_id())


def iteration_run_name() -> str:
    """Name of an iteration's flow run: the run's, and the iteration's number."""
    parameters = flow_run.get_parameters()
    return f"{parameters['config'].run}-it{parameters['iteration']:06d}"


def _made_name(identity: object) -> str:
    return f"run-{str(identity)[:8]}"
