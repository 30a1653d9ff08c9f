"""What a replay has to give: the recorded weights where they are promised; where not, the run goes on and says so."""

from __future__ import annotations

import pytest

from infra.object_store import open_store
from rlhf_core import layout
from rlhf_core.manifests import IterationRecord, StageManifest
from rlhf_core.records import canonical, load_record, seal

ELSEWHERE = "0" * 16
OTHER = "f" * 64


def reseal(store, key, model, **changes):
    record = seal(load_record(store, key, model).model_copy(update=changes))
    store.put(key, canonical(record.model_dump(mode="json")))
    return record


def changed(world, run, **details):
    """The update of iteration 1 says something else, and what follows agrees with it."""
    store = open_store(str(world.folder / ".rlhf" / "store"))
    keys = {stage: layout.stage_commit(run, 1, stage) for stage in ("update", "sync")}
    before = load_record(store, keys["update"], StageManifest)
    update = reseal(store, keys["update"], StageManifest, details=before.details | details)
    sync = reseal(store, keys["sync"], StageManifest, parents={"update": update.digest})
    done = layout.iteration_done(run, 1)
    stages = load_record(store, done, IterationRecord).stages
    reseal(store, done, IterationRecord, stages=stages | {"update": update.digest, "sync": sync.digest})
    return str(before.details["weights_digest"])


@pytest.fixture(scope="module")
def begun(world):
    """Two runs of two iterations, and the digest of the environment that both were computed in."""
    for run in ("x", "y"):
        world.train(run, "--set", "iterations=2")
    store = open_store(str(world.folder / ".rlhf" / "store"))
    (environment,) = store.list("runs/x/environments")
    return world.record(environment)


def test_the_environment_is_tested_at_the_start(begun):
    assert begun["exact"]
    assert begun["reason"] == ""
    assert begun["facts"]["deterministic"]
    assert begun["seconds"] > 0


def test_a_replay_that_is_not_exact_goes_on_and_is_told_everywhere(world, begun):
    true = changed(world, "x", weights_digest=OTHER, environment=ELSEWHERE)
    done = world.train("x", "--set", "iterations=3")
    assert (
        "policy version 2 was replayed, not exactly: the update of iteration 1 was computed in environment"
        in done.stderr
    )
    base = world.record(layout.base("x", 2, 1))
    assert (base["weights_digest"], base["replaces"], base["start"]) == (true, OTHER, 0)
    update = world.record(layout.stage_commit("x", 2, "update"))
    assert update["details"]["from_weights"] == true
    runs = [run["id"] for run in world.flow_runs("x")]
    assert "Replayed (not exact)" in world.task_states(runs[0], expected=3).values()
    (line,) = world.json("show", "x")["replayed"]
    assert line.startswith("policy version 2 of x was replayed from version 0, not exactly: ")
    audit = world.json("audit", "x")
    assert audit["proven"], audit["damage"]
    assert audit["replayed"] == [line]
    checkpoint = world.record(layout.checkpoint_commit("x", 2))
    assert checkpoint["weights_digest"] == true


def test_a_broken_promise_ends_the_run_until_exactness_is_given_up(world, begun):
    changed(world, "y", weights_digest=OTHER)
    command = ["train", str(world.preset), "--run", "y", "--set", "iterations=3"]
    refused = world.rlhf(*command)
    assert refused.returncode != 0
    assert "replaying the update of iteration 1 gave weights" in refused.stderr
    assert "--set optim.deterministic=false" in refused.stderr
    done = world.rlhf(*command, "--set", "optim.deterministic=false")
    assert done.returncode == 0, done.stderr
    assert "this run is not exact here: optim.deterministic = false" in done.stderr
    assert world.json("show", "y")["replayed"]
    assert world.json("show", "y")["iterations_done"] == 3
