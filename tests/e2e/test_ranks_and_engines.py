"""Several trainer ranks and engines, and more of them than the cluster has room for."""

from __future__ import annotations

import os

import pytest

from infra.object_store import open_store
from rlhf_core.buffer import load_stage, read_rows


def test_two_ranks_and_two_engines_run_to_the_end(world):
    world.train(
        "w", "--set", "resources.trainer_ranks=2", "--set", "resources.engines=2", "--set", "iterations=2", timeout=300
    )
    shown = world.json("show", "w")
    assert (shown["state"], shown["iterations_done"]) == ("complete", 2)
    store = open_store(str(world.folder / ".rlhf" / "store"))
    for iteration in range(2):
        generate = load_stage(store, "w", iteration, "generate")
        assert generate.rows == 8
        engines = read_rows(store, [generate], columns=["engine"])["engine"].to_pylist()
        assert engines == ["w-engine-0"] * 4 + ["w-engine-1"] * 4
        assert len(load_stage(store, "w", iteration, "advantages").shards) == 2, "each rank writes its rows"
        sync = load_stage(store, "w", iteration, "sync")
        assert sync.metrics["sync/probe_gap"] < 1e-4
        assert sync.details["engines"] == ["w-engine-0", "w-engine-1"]
    assert world.weights("w", 0) != world.weights("w", 1)
    assert world.actor_processes() == []


@pytest.mark.parametrize(
    ("run", "asked"),
    [
        ("engines", ["resources.engines=4000"]),
        ("both", ["resources.trainer_ranks=2500", "resources.engines=1500", "resources.colocate=false",
                  "generate.samples_per_prompt=2000"]),
    ],
)  # fmt: skip
def test_more_than_the_cluster_can_place_is_refused_with_both_numbers(world, run, asked):
    before = world.actor_processes()
    settings = [word for key in asked for word in ("--set", key)]
    done = world.rlhf("train", str(world.preset), "--run", f"huge-{run}", *settings)
    assert done.returncode == 2, done.stdout + done.stderr
    message = done.stderr[done.stderr.rindex("rlhf: ") :]
    assert "asks for 4000 CPU" in message
    assert f"the Ray cluster has {os.cpu_count()} CPU" in message
    assert "resources.trainer_ranks" in message
    assert world.actor_processes() == before
