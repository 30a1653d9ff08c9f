"""Several trainer ranks and engines, and more of them than the cluster has room for."""

from __future__ import annotations

import os

import pytest

from infra.object_store import open_store
from rlhf_core.buffer import load_stage, read_rows


@pytest.fixture(scope="module")
def wide(world):
    """Run ``wide``: three iterations on two ranks and two engines, by two flow runs."""
    words = (
        "iterations=3",
        "resources.trainer_ranks=2",
        "resources.engines=2",
        "limits.iterations_per_flow_run=2",
    )
    world.train("wide", *(part for word in words for part in ("--set", word)), timeout=300)
    return "wide"


def test_two_ranks_and_two_engines_run_to_the_end(world, wide):
    assert [run["state_type"] for run in world.flow_runs(wide)] == ["COMPLETED"] * 2
    shown = world.json("show", f"{wide}~0")
    assert (shown["state"], shown["iterations_done"]) == ("complete", 3)
    store = open_store(str(world.folder / ".rlhf" / "store"))
    for iteration in range(3):
        generate = load_stage(store, wide, iteration, "generate")
        assert generate.rows == 8
        engines = read_rows(store, [generate], columns=["engine"])["engine"].to_pylist()
        assert engines == ["wide-engine-0"] * 4 + ["wide-engine-1"] * 4
        assert len(load_stage(store, wide, iteration, "advantages").shards) == 2, "each rank writes its rows"
        sync = load_stage(store, wide, iteration, "sync")
        assert sync.metrics["sync/probe_gap"] < 1e-4
        assert sync.details["engines"] == ["wide-engine-0", "wide-engine-1"]
    assert len({world.weights(wide, iteration) for iteration in range(3)}) == 3
    assert world.actor_processes() == []


def test_a_run_goes_on_with_fewer_ranks(world, wide):
    for words in (
        ("rerun", wide, "--iteration", "2", "--from", "advantages", "--no-train"),
        ("resume", wide, "--new-topology", "resources.trainer_ranks=1"),
    ):
        done = world.rlhf(*words, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    shown, view = world.json("show", wide), world.json("audit", wide)
    assert shown["state"] == "complete"
    assert view["proven"], view["damage"]
    assert view["branches"][-1] == wide
    assert all(row["metrics"]["update/grad_norm"] > 0 for row in shown["iterations"])


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
