"""Reruns, forks and guards, on whole runs by the command."""

from __future__ import annotations

import shutil

import pytest

from rlhf_core.manifests import STAGES

LATER = range(4, 7)


@pytest.fixture(scope="module")
def fork(world, reference):
    """Run ``fa``: a fork of the reference run from ``score`` of iteration 4 with nothing changed."""
    done = world.rlhf("fork", "a", "--iteration", "4", "--from", "score", "--run", "fa", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return "fa"


def test_a_fork_with_the_same_settings_is_the_same_run(world, fork):
    assert [world.weights(fork, k) for k in LATER] == [world.weights("a", k) for k in LATER]
    assert world.json("show", fork)["state"] == "complete"


def test_a_fork_copies_nothing(world, fork):
    runs = world.folder / ".rlhf/store/runs"
    assert set(world.commits(fork, 4)) == set(STAGES[1:-1])
    assert not (runs / fork / "iterations/000003").exists()
    assert not (runs / fork / "iterations/000004/data/generate").exists()
    assert not (runs / fork / "prompts").exists()


def test_a_rerun_is_a_new_revision_and_the_old_one_stays(world, fork):
    before = {k: world.commits(fork, k) for k in (5, 6)}
    done = world.rlhf("rerun", fork, "--iteration", "5", "--from", "update", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {k: world.commits(fork, k) for k in (5, 6)} == before
    assert [world.weights(f"{fork}~1", k) for k in (5, 6)] == [world.weights("a", k) for k in (5, 6)]
    shown = world.json("show", fork)
    assert shown["lineage"] == [
        f"{fork}~1: from update of iteration 5 of {fork}",
        f"{fork}: from score of iteration 4 of a",
    ]
    view = world.json("audit", fork)
    assert view["proven"], view["damage"]
    assert view["branches"] == [f"{fork}~1", fork, "a"]


def test_a_batch_that_is_out_of_bounds_is_left_out(world):
    words = ("--set", "iterations=2", "--set", "guards.max_grad_norm=1e-9", "--set", "guards.action=skip")
    done = world.train("guarded", *words, timeout=300)
    assert "rolling back to policy version 0" in done.stdout + done.stderr
    assert world.weights("guarded", 0) == world.weights("guarded", 1)
    view = world.json("audit", "guarded")
    assert view["proven"], view["damage"]
    assert view["trained"] == 0
    assert list(view["left_out"].values()) == [2 * 2 * 4]


def test_a_guard_stops_before_the_commit_and_the_actors_stay_until_they_are_collected(world):
    words = ("--set", "iterations=2", "--set", "guards.min_reward=5")
    done = world.rlhf("train", str(world.preset), "--run", "stopped", *words, timeout=240)
    assert done.returncode == 3
    assert "reward/mean" in done.stderr
    assert "guards.min_reward = 5" in done.stderr
    assert set(world.commits("stopped", 0)) == {"generate", "score", "advantages"}
    kept = {process.pid for process in world.actor_processes()}
    assert len(kept) == 3, "for whoever resumes it"
    # What it left on the cluster is none of the business of a run of the same name in another store.
    shutil.copytree(world.folder / ".rlhf/store/runs/stopped", world.folder / "another/runs/stopped")
    namesake = world.rlhf("gc", "stopped", "--store", "another", timeout=120)
    assert namesake.returncode == 0, namesake.stdout + namesake.stderr
    assert {process.pid for process in world.actor_processes()} == kept
    ended = world.rlhf("gc", "stopped", timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert world.actor_processes() == []
