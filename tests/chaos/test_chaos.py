"""Everything dies, at seeded instants, and the run ends in the weights of the one that nobody disturbed.

A short choice; `benchmarks/chaos.py` strikes a hundred times (docs/chaos-results.md).
"""

from __future__ import annotations

import random

import pytest
from chaos import Proof

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

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_disturbed_run_ends_like_a_calm_one(chaos, undisturbed, chain):
    passage = chaos.run_through(chain, CHAINS[chain], random.Random(chain), pause=(0.5, 3.0), timeout=1100)
    assert passage.strikes, "the run was over before anything struck"
    proof = Proof.of(chaos.store(), chain)
    struck = [(strike.fault, strike.where) for strike in passage.strikes]
    assert proof.weights == undisturbed.weights, struck
    assert proof.prompts == undisturbed.prompts, struck
    assert proof.rewards == undisturbed.rewards, struck
    assert proof.regenerated == [], struck


def test_the_store_proves_the_disturbed_runs(chaos, undisturbed):
    from tasks.audit import audit_run

    for run in ("calm", *CHAINS):
        view = audit_run("s3://chaos/runs-here", run)
        assert view.proven, view.damage
