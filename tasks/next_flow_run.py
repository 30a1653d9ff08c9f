"""Going on in another flow run."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run

from rlhf_core.config import RunConfig

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun


def start_next(config: RunConfig, iteration: int) -> None:
    """Start the deployment of this flow run again, for the same run; asked twice, it starts one.

    Does nothing without a deployment: whoever called the flow calls it again.
    """
    identity = deployment.get_id()
    if identity is None:
        return
    started = run_deployment(
        identity,
        flow_run_name=config.run_id,
        parameters={"config": config.model_dump(mode="json")},
        timeout=0,
        as_subflow=False,
        tags=flow_run.get_tags(),
        job_variables=flow_run.get_job_variables() or None,
        # A name that the run alone makes would find the flow runs of an earlier run of this name.
        idempotency_key=f"{flow_run.get_id()}-it{iteration}",
    )
    following = cast("FlowRun", started)  # a coroutine only where a loop runs
    get_run_logger().info("%s goes on from iteration %d in flow run %s", config.run_id, iteration, following.id)
