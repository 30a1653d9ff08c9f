"""Whether updates are repeatable where the ranks are: recorded once for every environment, said at the start."""

from __future__ import annotations

from prefect.logging import get_run_logger

from rlhf_core import layout
from rlhf_core.bases import environment_id, find_environment
from rlhf_core.config import RunConfig
from rlhf_core.manifests import ClusterRef, EnvironmentRecord
from rlhf_core.records import commit_record
from tasks.checkpoint import checkpoint_interval
from tasks.context import StageContext
from tasks.handover import engines_at_start, trainers_at_start


def check_environment(config: RunConfig, cluster: ClusterRef) -> bool:
    """Whether a replay on these ranks gives the same bits; says now what follows if it does not.

    ConfigError if deterministic kernels are asked for and the model needs an operation that has none.
    """
    context = StageContext(config, cluster, 0, attempt="environment")
    facts = context.trainers.call_status(context.deadline)[0]["environment"]
    name = environment_id(facts)
    record = find_environment(context.store, context.lineage, name)
    if record is None:
        exact, reason, seconds = (
            _test(context) if facts["deterministic"] else (False, "optim.deterministic = false", 0.0)
        )
        made = EnvironmentRecord(run=context.run, facts=facts, exact=exact, reason=reason, seconds=seconds)
        record, _ = commit_record(context.store, layout.environment(context.run, name), made)
    if not record.exact:
        every = checkpoint_interval(config, exact=False)
        get_run_logger().warning(
            "this run is not exact here: %s. What a lost rank had computed since the newest checkpoint is replayed to slightly "
            "other weights, and the run goes on from those; so a checkpoint is made every %d iterations",
            record.reason,
            every,
        )
    return record.exact


def _test(context: StageContext) -> tuple[bool, str, float]:
    """Whether the ranks compute an update twice to the same bits, why not, and the seconds that it took to know."""
    trainers_at_start(context)
    found = context.trainers.call("self_test", seconds=context.deadline)
    engines_at_start(context)
    seconds = max(result.seconds for result in found)
    get_run_logger().info(
        "two updates from one state gave %s bits (%.1f s)", "the same" if found[0].exact else "other", seconds
    )
    return all(result.exact for result in found), found[0].reason, seconds
