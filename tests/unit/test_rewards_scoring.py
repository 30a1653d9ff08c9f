"""Calling reward functions, combining what they say, and what happens when one breaks."""

import asyncio
import pickle
import sys

import numpy as np
import pytest
import torch

from rlhf_core.errors import RewardError
from rlhf_core.rewards.calling import call_reward
from rlhf_core.rewards.contract import RewardResult
from rlhf_core.rewards.scoring import NOTHING_SAID, ScoredBatch, combine

SAMPLES = ("s0", "s1", "s2", "s3")


def constant(value):
    return lambda **_: value


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture
def score(loop):
    """Function: values of functions, or functions -> the combined scores of some rows."""

    def run(*values, weights=None, clip=None, rows=2):
        names, samples = [f"f{n}" for n in range(len(values))], SAMPLES[:rows]
        batch = {"prompts": ["?"] * rows, "metadata": [{"n": n} for n in range(rows)]}
        answers = {
            name: call_reward(name, v if callable(v) else constant(v), batch, samples, loop)
            for name, v in zip(names, values, strict=True)
        }
        return combine(answers, dict(zip(names, weights or [1.0] * len(values), strict=True)), samples, clip)

    return run


def test_weighted_sum_and_clip(score):
    scored = score([1.0, 2.0], [10.0, -20.0], weights=[0.5, 2.0], clip=25.0)
    assert scored.rewards == [20.5, -25.0]
    assert scored.status == ["ok", "ok"]
    assert scored.error == [None, None]
    assert scored.components == {"f0": [1.0, 2.0], "f1": [10.0, -20.0]}


@pytest.mark.parametrize(
    "values",
    [
        (1, 0),
        [True, False],
        np.array([1.0, 0.0], dtype=np.float32),
        [np.bool_(True), np.float64(0)],
        torch.tensor([1.0, 0.0]),
        [RewardResult(1.0), 0.0],
    ],
)
def test_all_kinds_of_numbers(score, values):
    scored = score(values)
    assert scored.rewards == [1.0, 0.0]
    assert all(type(r) is float for r in scored.rewards)


def test_missing_is_not_zero(score):
    down = RewardResult(status="failed_infra", error="server down")
    bad = RewardResult(status="invalid_data", error="no answer")
    scored = score([1.0, down, bad, down], [1.0, 1.0, down, bad], rows=4)
    assert scored.rewards == [2.0, None, None, None]
    assert scored.status == ["ok", "failed_infra", "invalid_data", "invalid_data"]
    assert scored.error == [None, "f0: server down", "f0: no answer", "f1: no answer"]
    assert scored.components == {"f0": [1.0, None, None, None], "f1": [1.0, 1.0, None, None]}


def raises(**_):
    raise ZeroDivisionError("oops")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (raises, ["raised ZeroDivisionError: oops (test_rewards_scoring.py, line", "2 rows, samples s0 to s1"]),
        ([1.0], ["returned 1 values for 2 rows, samples s0 to s1"]),
        ([0.0, float("nan")], ["returned nan for sample s1"]),
        ([0.0, RewardResult(float("inf"))], ["returned inf for sample s1"]),
        (["1.0", 0.0], ["'1.0' (str) for sample s0"]),
        (torch.ones(2, 2), ["for sample s0, which is not one number"]),
        ((v for v in (1.0, 2.0)), ["a generator, not a list"]),
    ],
)
def test_a_broken_function_is_named(score, value, parts):
    with pytest.raises(RewardError) as caught:
        score([1.0, 1.0], value)
    for part in ("'f1'", *parts):
        assert part in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_sum_that_overflows(score):
    with pytest.raises(RewardError, match="weighted sum of the rewards of sample s0 is inf"):
        score([1e308, 0.0], weights=[100.0], clip=1.0)


async def slow(*, prompts, metadata, **_):
    await asyncio.gather(*(asyncio.sleep(0) for _ in prompts))
    return [float(row["n"]) for row in metadata]


async def slow_raises(**_):
    await asyncio.sleep(0)
    raise ValueError("late")


def test_async_functions(score):
    assert score(slow).rewards == [0.0, 1.0]
    with pytest.raises(RewardError, match="'f0' raised ValueError: late"):
        score(slow_raises)


def test_what_is_not_said_counts_nowhere(score):
    down = RewardResult(status="failed_infra", error="server down")
    scored = score([1.0, None, None, None], [None, 2.0, None, down], rows=4)
    assert scored.rewards == [1.0, 2.0, None, None]
    assert scored.status == ["ok", "ok", "invalid_data", "failed_infra"]
    assert scored.error == [None, None, NOTHING_SAID, "f1: server down"]
    assert scored.components == {"f0": [1.0, None, None, None], "f1": [None, 2.0, None, None]}


def leaves(**_):
    sys.exit("no key")


async def leaves_later(**_):
    await asyncio.sleep(0)
    sys.exit("no key")


@pytest.mark.parametrize("function", [leaves, leaves_later])
def test_leaving_is_an_error_of_the_function(score, function):
    with pytest.raises(RewardError, match=r"'f0' raised SystemExit: no key \(test_rewards_scoring.py, line"):
        score(function)
    assert score(slow).rewards == [0.0, 1.0], "the loop goes on"


def test_nothing_is_a_score_of_nothing():
    assert combine({"f0": []}, {"f0": 1.0}, [], None) == ScoredBatch([], [], [], {"f0": []})
