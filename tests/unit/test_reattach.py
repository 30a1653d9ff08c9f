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


class DoubtfulActors:
    """In the place of ``ActorGroup``: one actor that answers and says why it is not to be trusted, among others that are whole."""

    doubtful = ""

    def __init__(self, names, namespace, epoch, patience):
        (self.name,) = names

    def call_claim(self, seconds):
        return self.call_status(seconds)

    def call(self, method, seconds):
        return [None]

    def call_status(self, seconds):
        doubt = (
            "sleep failed with AcceleratorError: CUDA error: invalid argument" if self.name == self.doubtful else None
        )
        return [{"name": self.name, "epoch": 2, "version": 0, "digest": None, "doubt": doubt}]


@pytest.mark.parametrize(
    ("device", "doubtful", "kept"),
    [
        ("cpu", "r-engine-0", {"r-trainer-0", "r-reward-0"}),
        ("cpu", "r-trainer-0", {"r-engine-0", "r-reward-0"}),
        ("cpu", "r-reward-0", {"r-trainer-0", "r-engine-0"}),
        ("gpu", "r-engine-0", {"r-reward-0"}),  # the new engine has to find the shared GPU empty
        ("gpu", "r-trainer-0", {"r-reward-0"}),
        ("gpu", "", ALL),
    ],
)
def test_a_worker_that_may_be_broken_is_replaced(tmp_path, monkeypatch, caplog, device, doubtful, kept):
    """Else every attempt meets the same process again, and fails as it did, until the run gives up."""
    monkeypatch.setattr(DoubtfulActors, "doubtful", doubtful)
    monkeypatch.setattr(module, "ActorGroup", DoubtfulActors)
    monkeypatch.setattr(module, "statuses", lambda names, namespace, seconds: {name: {"epoch": 2} for name in names})
    monkeypatch.setattr(module, "kill", lambda names, namespace: None)
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("reattach"))
    monkeypatch.setattr(module, "has_begun", lambda store, config: True)
    config = parse_config({"run": "r", "storage": {"url": str(tmp_path / "store")}})
    found = claim_intact(config, CLUSTER.model_copy(update={"device": device}), Position(0, None, None))
    assert found.names == kept
    assert ("is replaced: its sleep failed with AcceleratorError" in caplog.text) is bool(doubtful)
