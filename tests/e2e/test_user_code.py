"""Reward functions of a user in a run: what they find around themselves, and what is repaired while the actors live on."""

from __future__ import annotations

import json
import os

import pytest

REWARDS = """
import asyncio
import os
from grading import share
from rlhf_core.rewards.contract import RewardResult

LIMIT = asyncio.Semaphore(1)  # made once, as clients of judges are


async def one(text):
    async with LIMIT:
        await asyncio.sleep(0)
        return share(text) + float(os.environ["JUDGE_LIMIT"])


async def judge(*, completions, answers, completion_ids, **_):
    scores = list(await asyncio.gather(*(one(text) for text in completions)))
    if completions == answers:  # the trial
        return scores
    if len(completions) < 4:  # an evaluation
        return [RewardResult(status="invalid_data", error="not now") for _ in completions]
    return [None if index == 0 else score for index, score in enumerate(scores)]


def only_the_first(*, completions, finish_reasons, **_):
    return [0.5 if index == 0 else None for index in range(len(completions))]
"""
#: Answers two rows of the trial and up to five of the evaluation in a worker; then it never returns.
HANGS = "import socket\nPAIR = socket.socketpair()\nCALLS = []\n"
HANGS += "def share(text):\n    CALLS.append(1)\n    return PAIR[0].recv(1) if len(CALLS) > 5 else 0.0\n"
WORKS = "def share(text):\n    return sum(c in 'abcdefghijklm' for c in text) / max(1, len(text))\n"
SETTINGS = (
    "iterations=2",
    "prompts.heldout=3",
    "evaluation.samples_per_prompt=2",
    "resources.engines=2",
    "resources.reward_workers=2",
    "reward.timeout_seconds=20",
    'reward.environment=["JUDGE_LIMIT"]',
    "reward.special_tokens=true",
    'reward.functions=[{function = "judging/rewards.py:judge"}, {function = "judging/rewards.py:only_the_first"}]',
)


def train(world, run, *more, **variables):
    words = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return world.rlhf("train", str(world.preset), "--run", run, *words, timeout=300, **variables)


@pytest.fixture(scope="module")
def folder(world):
    """The user's files, beside the store."""
    path = world.folder / "judging"
    path.mkdir()
    (path / "rewards.py").write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def hanging(world, folder):
    """Run ``u``, stopped by a function that hangs in the workers; the processes of its actors."""
    (folder / "grading.py").write_text(HANGS)
    done = train(world, "code", JUDGE_LIMIT="1")
    return done, {process.pid for process in world.actor_processes()}


@pytest.fixture(scope="module")
def repaired(world, folder, hanging):
    """Run ``u`` after the file beside the function was repaired, with another value of the variable."""
    (folder / "grading.py").write_text(WORKS)
    before = {process.pid for process in world.actor_processes()}
    return before, world.rlhf("resume", "code", timeout=300, JUDGE_LIMIT="2")


def test_a_function_that_hangs_in_a_worker_ends_at_its_deadline(world, hanging):
    done, actors = hanging
    assert done.returncode != 0
    assert "reward function 'judge' gave no answer within 20 s (reward.timeout_seconds) on 4 rows" in done.stderr
    assert len(actors) >= 5


def test_the_next_command_uses_what_was_repaired(world, hanging, repaired):
    before, done = repaired
    assert done.returncode == 0, done.stderr
    assert before == hanging[1], "the actors lived on"
    rollouts = world.json("rollouts", "code", "1")
    assert len(rollouts) == 8
    for index, rollout in enumerate(rollouts):
        text = rollout["response"]
        share = sum(c in "abcdefghijklm" for c in text) / max(1, len(text))
        if index % 4 == 0:  # the first row of each worker
            assert rollout["components"] == {"judge": None, "only_the_first": 0.5}
            assert rollout["reward"] == 0.5
        else:
            assert rollout["components"] == {"judge": pytest.approx(share + 2), "only_the_first": None}


def test_an_evaluation_without_any_score_has_no_figure(world, repaired):
    record = world.record("runs/code/evaluations/v0000000000.json")
    assert {k: v for k, v in record["metrics"].items() if k.endswith(("reward", "invalid_data"))} == {
        "greedy/reward/invalid_data": 3.0,
        "sampled/reward/invalid_data": 6.0,
    }
    assert world.json("show", "code")["reward_before"] is None
    assert "- before, - after" in repaired[1].stdout


def test_values_of_variables_are_not_stored(world, repaired):
    secret = json.dumps(world.record("runs/code/run.json")["config"]["reward"]["environment"])
    assert secret == '["JUDGE_LIMIT"]'


def test_an_evaluation_does_not_depend_on_the_number_of_engines(world, folder, repaired):
    done = train(world, "code-1", "iterations=1", "resources.engines=1", "resources.reward_workers=1", JUDGE_LIMIT="2")
    assert done.returncode == 0, done.stderr
    one, two = (world.record(f"runs/{run}/evaluations/v0000000000.json")["samples"] for run in ("code-1", "code"))
    assert [s["response"] for s in one] == [s["response"] for s in two]
    assert len({s["response"] for s in one if s["kind"] == "sampled"}) > 3


def test_a_variable_that_does_not_travel_is_found_before_the_start(world, folder):
    done = train(world, "u2", "reward.environment=[]", JUDGE_LIMIT="1")
    assert done.returncode == 2
    assert 'reward.environment = ["JUDGE_LIMIT"]' in done.stderr
    done = train(world, "u2")
    assert done.returncode == 2
    assert "reward.environment names JUDGE_LIMIT, which is not set here" in done.stderr
    assert "JUDGE_LIMIT" not in os.environ
