"""Everything dies, at seeded instants, and the run ends in the weights of the one that nobody disturbed.

A short choice; `benchmarks/chaos.py` strikes a hundred times (docs/chaos-results.md).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from chaos import Proof, tail
from processes import ending

from tasks.audit.run import audit_run
from tasks.runs import list_runs

STORE = "s3://chaos/runs-here"

#: Faults in the order in which they strike one run, each after the one before was overcome.
CHAINS = {
    "drivers-and-actors": ["driver", "engine", "rank", "driver", "all actors", "reward"],
    "services": ["prefect server", "worker", "ray cluster"],
    "store": [
        "store down",
        "store 503",
        "store cut put",
        "store lost answer",
        "store flipped get",
        "store short get",
        "store slow",
    ],
}

#: Only with RLHF_SLOW_TESTS=1: minutes, and each fault has contract or integration tests of its own.
LONGER = ("services", "store")

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("chain", ["drivers-and-actors", *(pytest.param(c, marks=pytest.mark.slow) for c in LONGER)])
def test_a_disturbed_run_ends_like_a_calm_one(chaos, undisturbed, chain):
    passage = chaos.run_through(chain, CHAINS[chain], random.Random(chain), pause=(0.5, 3.0), timeout=1100)
    assert passage.strikes, "the run was over before anything struck"
    proof = Proof.of(chaos.store(), chain)
    struck = [(strike.fault, strike.where) for strike in passage.strikes]
    assert proof.weights == undisturbed.weights, struck
    assert proof.prompts == undisturbed.prompts, struck
    assert proof.rewards == undisturbed.rewards, struck
    assert proof.regenerated == [], struck


def test_a_node_that_dies_is_replaced_by_another(chaos, undisturbed):
    """Trainers on one node, engines on another one, which dies with all its processes."""
    words = ("train", str(chaos.preset), "--run", "node", "--set", "resources.colocate=false")
    with ExitStack() as started:
        with chaos.extra_node(2) as raylet:
            driver, log = chaos.start(*words)
            started.enter_context(ending(driver))
            wait_for(lambda: chaos.position("node").startswith("2 ") or driver.poll() is not None)
            assert driver.poll() is None, tail(log)
            raylet.kill()
        with chaos.extra_node(2):
            assert driver.wait(600) == 0, tail(log)
    proof = Proof.of(chaos.store(), "node")
    assert proof.weights == undisturbed.weights
    assert proof.prompts == undisturbed.prompts
    assert proof.regenerated == []
    assert "rebuilding what is gone" in log.read_text()


def wait_for(condition: Callable[[], bool], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing for {seconds} s"
        time.sleep(0.05)


def test_the_store_proves_the_disturbed_runs(chaos, undisturbed):
    runs = [row.run for row in list_runs(STORE)]
    assert "calm" in runs
    for run in runs:
        view = audit_run(STORE, run)
        assert view.proven, (run, view.damage)
