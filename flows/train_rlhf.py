"""RLHF, one iteration after the other.

    prompts --> generate --> score --> advantages --> update --> sync --> commit
                 engines     reward     trainer ranks           trainer     driver
                 (vLLM)      workers    (ZeRO-3): logprobs,     ranks ->
                    |           |       estimator, optimizer    engines
                    v           v              |
               rollouts     rewards       experience            DONE.json
               -------- Arrow column groups in the object store ----------

Only small values cross Prefect: the configuration, names of actors, manifests. Each stage looks for its manifest first, so
running the same run again continues after the last committed stage.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from prefect import flow

from flows.iteration import run_iteration
from rlhf_core.config import RunConfig
from rlhf_core.manifests import RunSummary
from tasks.cluster import stop_actors
from tasks.driver import Driver, drive
from tasks.evaluate import evaluate
from tasks.export import export_policy
from tasks.names import named, training_run_name
from tasks.next_flow_run import start_next


def _stop(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancelling the flow ends its actors too; they would outlive it."""
    stop_actors(named(RunConfig.model_validate(flow_run.parameters["config"]), flow_run.id))


@flow(name="train-rlhf", flow_run_name=training_run_name, persist_result=False, on_cancellation=[_stop])
def train_rlhf(config: RunConfig) -> RunSummary:
    """Train a policy, or continue the run of this name after its last committed stage.

    A deployment starts its next flow run itself where one has done `limits.iterations_per_flow_run`. Without a deployment
    ``finished`` of the summary is False then: call the flow again.

    Args:
        config: everything that defines the run; see docs/configuration.md.
    """
    config = named(config)
    with drive(config) as driver:
        summary = _iterate(config, driver)
    if not summary.finished:
        start_next(config, summary.iterations)
    return summary


def _iterate(config: RunConfig, driver: Driver) -> RunSummary:
    if driver.is_finished():
        return driver.finish()
    cluster = driver.start_cluster()
    if driver.at_start():
        cluster = driver.persevere(cluster, driver.check_parity)
        cluster = driver.persevere(cluster, lambda c: evaluate(config, c, version=0))
    for k in driver.pending():
        cluster = driver.persevere(cluster, partial(run_iteration, config, iteration=k))
        driver.publish(cluster)
        if driver.evaluates_after(k):
            cluster = driver.persevere(cluster, partial(evaluate, config, version=k + 1))
    if driver.has_more():
        return driver.hand_over()
    cluster = driver.persevere(cluster, partial(export_policy, config, version=config.iterations))
    driver.publish(cluster, wait=True)
    return driver.finish()
