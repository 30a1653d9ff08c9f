"""One iteration as a flow run of its own."""

from __future__ import annotations

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.transactions import CommitMode, transaction

from rlhf_core.config import RunConfig
from rlhf_core.manifests import ClusterRef
from tasks.advantages import advantages
from tasks.checkpoint import due, save_checkpoint
from tasks.commit import commit
from tasks.generate import generate
from tasks.names import iteration_run_name
from tasks.score import score
from tasks.sync import sync
from tasks.update import update


@flow(name="iteration", flow_run_name=iteration_run_name, persist_result=False)
def iteration_flow(config: RunConfig, cluster: ClusterRef, iteration: int) -> None:
    """The stages in order. What they exchange lies in the store; a committed stage ends as ``Reused``."""
    generate(config, cluster, iteration)
    score(config, cluster, iteration)
    advantages(config, cluster, iteration)
    update(config, cluster, iteration)
    if due(config, cluster.exact, iteration):
        save_checkpoint(config, cluster, iteration)
    sync(config, cluster, iteration)
    commit(config, cluster, iteration)


# A subflow that is called directly is matched by call order when the parent is retried: a loop that starts at the checkpoint
# would silently adopt another iteration's run. Called from inside a task it has an identity of its own.
@task(name="iteration", task_run_name="iteration-{iteration:06d}", persist_result=False, cache_policy=NO_CACHE)
def run_iteration(config: RunConfig, cluster: ClusterRef, iteration: int) -> None:
    """Run one iteration as a subflow."""
    # Else Prefect marks the finished stages of an iteration that fails as rolled back. What is committed stays committed.
    with transaction(commit_mode=CommitMode.EAGER):
        iteration_flow(config, cluster, iteration)
