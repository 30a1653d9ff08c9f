"""Runs that learn nothing: they say so, and do not go on like that for ever."""

from __future__ import annotations

import json
from pathlib import Path

REWARDS = Path(__file__).parents[1] / "fixtures" / "e2e_rewards.py"


def train(world, run, function, *words, **options):
    reward = f"[{{function = {json.dumps(f'{REWARDS}:{function}')}, options = {options['toml']}}}]"
    settings = ["prompts.heldout=0", f"reward.functions={reward}", *words]
    arguments = [word for setting in settings for word in ("--set", setting)]
    return world.rlhf("train", str(world.preset), "--run", run, *arguments, timeout=240)


def test_batches_that_nothing_scores_stop_the_run_until_somebody_mends_it(world):
    marker = world.folder / "judge"
    toml = f"{{marker = {json.dumps(str(marker))}}}"
    words = ("iterations=3", "guards.unscored_in_a_row=2")
    done = train(world, "u", "unsure", *words, toml=toml)
    assert done.returncode == 2, done.stdout + done.stderr
    reason = "iteration 1: nothing was scored (8 failed_infra); the first reason: unsure: the judge is silent"
    assert reason in done.stderr
    assert "number 2 in a row (guards.unscored_in_a_row)" in done.stderr
    shown = world.json("show", "u")
    assert (shown["iterations_done"], shown["iterations"][0]["note"]) == (1, "nothing was scored (8 failed_infra)")
    assert "reward/mean" not in shown["iterations"][0]["metrics"]
    rollout = world.json("rollouts", "u", "0")[0]
    assert (rollout["reward"], rollout["status"], rollout["components"]) == (None, "failed_infra", {"unsure": None})
    assert "reward none (failed_infra: unsure: the judge is silent)" in world.rlhf("rollouts", "u", "0").stdout
    assert world.weights("u", 0) != ""
    assert "score" not in world.commits("u", 1)

    marker.touch()
    done = world.rlhf("resume", "u", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 3 iterations (1: nothing was scored)" in done.stdout
    assert world.json("show", "u")["state"] == "complete"
    assert world.rlhf("audit", "u").returncode == 0


def test_rewards_that_are_all_equal_stop_the_run_which_can_be_finished_where_it_stands(world):
    words = ("iterations=5", "guards.unlearned_in_a_row=2")
    done = train(world, "e", "same", *words, toml="{}")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the mean reward is 1. That is number 2 in a row that leaves the weights as they are" in done.stderr
    assert "--set iterations=1" in done.stderr
    done = train(world, "e", "same", "iterations=1", *words[1:], toml="{}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 1 iterations (1: no row had a gradient" in done.stdout
    table = world.rlhf("show", "e").stdout
    assert "no row had a gradient, as no group has two different rewards" in table
    assert world.json("show", "e")["state"] == "complete"
