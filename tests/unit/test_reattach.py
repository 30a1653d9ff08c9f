"""Which living actors a driver goes on with."""

from __future__ import annotations

import logging

import pytest

from rlhf_core.config import parse_config
from rlhf_core.manifests import ClusterRef
from tasks import reattach as module
from tasks.reattach import Position, claim_intact

CLUSTER = ClusterRef(
    namespace="n",
    branch="r",
    epoch=2,
    device="cpu",
    trainers=("r-trainer-0",),
    engines=("r-engine-0",),
    rewards=("r-reward-0",),
)
ALL = {*CLUSTER.trainers, *CLUSTER.engines, *CLUSTER.rewards}


@pytest.fixture
def actors(monkeypatch):
    """Function: (epochs by name, whether the run has committed something) -> the actors that are kept."""

    def keep(tmp_path, epochs, begun):
        held = {name: {"epoch": epoch, "version": 0, "digest": None} for name, epoch in epochs.items()}
        monkeypatch.setattr(module, "statuses", lambda names, namespace, seconds: held)
        monkeypatch.setattr(module, "_settled", lambda config, cluster, names: {name: held[name] for name in names})
        monkeypatch.setattr(module, "kill", lambda names, namespace: None)
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("reattach"))
        monkeypatch.setattr(module, "has_begun", lambda store, config: begun)
        config = parse_config({"run": "r", "storage": {"url": str(tmp_path / "store")}})
        return claim_intact(config, CLUSTER, Position(0, None, None)).names

    return keep


def test_a_run_that_has_begun_keeps_the_actors_of_earlier_drivers(tmp_path, actors):
    assert actors(tmp_path, dict.fromkeys(ALL, 1), begun=True) == ALL


def test_a_run_that_has_committed_nothing_keeps_only_its_own(tmp_path, actors):
    assert actors(tmp_path, dict.fromkeys(ALL, 1), begun=False) == set()
    assert actors(tmp_path, dict.fromkeys(ALL, 2), begun=False) == ALL
    assert actors(tmp_path, dict.fromkeys(ALL, 2) | {"r-engine-0": 1}, begun=False) == ALL - {"r-engine-0"}
