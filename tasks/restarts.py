"""Flow runs that an automation starts again when their process has died (infra/deploy/automations.yaml)."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

from prefect import get_client
from prefect.runtime import flow_run

from rlhf_core.config import RunConfig
from rlhf_core.errors import TooManyRestarts
from tasks.runs import resume_command

#: The message that the automation gives the new state.
BY_AUTOMATION = "restarted by automation"


def check_restarts(config: RunConfig) -> None:
    """TooManyRestarts if the automation started this flow run (or the rerun or fork above it) more than `limits.restarts` times."""
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(str(flow_run.get_root_flow_run_id())))
    states.sort(key=lambda state: state.timestamp)
    # A death is often reported twice, by the process and by its worker, and the automation answers twice. Starts are what counts.
    starts = [state for state, later in pairwise(states) if state.is_scheduled() and later.is_pending()]
    count = sum(state.message == BY_AUTOMATION for state in starts)
    # A start by a person is always good: who presses Retry has looked.
    if count > config.limits.restarts and starts[-1].message == BY_AUTOMATION:
        raise TooManyRestarts(
            f"the process of run {config.run_id} has died {count} times; limits.restarts = {config.limits.restarts}. "
            f"Its logs tell why (often memory). Then press Retry, or: {resume_command(config.run_id, config.storage.url)}"
        )
