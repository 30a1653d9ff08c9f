"""Everything dies, at seeded instants, and the run ends in the weights of the one that nobody disturbed.

A short choice; `benchmarks/chaos.py` strikes a hundred times (docs/chaos-results.md).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import psutil
import pytest
from chaos import Proof, tail
from chaos_faults import DISK_FULL
from processes import ending

from tasks.audit.run import audit_run
from tasks.runs import list_runs

STORE = "s3://chaos/runs-here"

#: Faults in the order in which they strike one run, each after the one before was overcome.
CHAINS = {
    "drivers-and-actors": ["driver", "engine", "rank", "driver", "all actors", "reward"],
    "stopped": ["engine stopped", "rank stopped", "clock jumps", "reward stopped", "driver"],
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
    "disk": [DISK_FULL, DISK_FULL],
}

#: Only with RLHF_SLOW_TESTS=1: minutes, and each fault has contract or integration tests of its own.
LONGER = ("services", "store", "disk")

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("chain", [c if c not in LONGER else pytest.param(c, marks=pytest.mark.slow) for c in CHAINS])
def test_a_disturbed_run_ends_like_a_calm_one(chaos, undisturbed, chain):
    if DISK_FULL in CHAINS[chain] and chaos.disk_refused is not None:
        pytest.skip(f"no disk can be filled here: {chaos.disk_refused}")
    passage = chaos.run_through(chain, CHAINS[chain], random.Random(chain), pause=(0.5, 3.0), timeout=1100)
    assert passage.strikes, "the run was over before anything struck"
    proof = Proof.of(chaos.store(), chain)
    struck = [(strike.fault, strike.where) for strike in passage.strikes]
    assert proof.weights == undisturbed.weights, struck
    assert proof.prompts == undisturbed.prompts, struck
    assert proof.rewards == undisturbed.rewards, struck
    assert proof.regenerated == [], struck
    if any(fault in ("engine stopped", "rank stopped") for fault, _ in struck):
        assert "has not answered for" in "".join(log.read_text() for log in passage.logs), struck


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


@pytest.mark.slow
def test_a_node_that_is_cut_off_and_comes_back(chaos, undisturbed):
    """It falls silent with all its processes, is replaced, and then goes on where it stood."""
    words = ("train", str(chaos.preset), "--run", "silent", "--set", "resources.colocate=false")
    with chaos.extra_node(2) as raylet:
        driver, log = chaos.start(*words)
        try:
            wait_for(lambda: chaos.position("silent").startswith("2 ") or driver.poll() is not None)
            assert driver.poll() is None, tail(log)
            silenced = [*raylet.children(recursive=True), raylet]
            for process in silenced:
                process.suspend()
            with chaos.extra_node(2):
                wait_for(lambda: chaos.position("silent").startswith("4 ") or driver.poll() is not None)
                for process in silenced:
                    with suppress(psutil.NoSuchProcess):
                        process.resume()
                assert driver.wait(600) == 0, tail(log)
        finally:
            driver.kill()
            driver.wait()
    proof = Proof.of(chaos.store(), "silent")
    assert proof.weights == undisturbed.weights
    assert proof.prompts == undisturbed.prompts
    assert "has not answered for" in log.read_text()


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
