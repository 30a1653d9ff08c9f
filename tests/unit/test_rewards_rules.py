"""The built-in reward rules."""

import math

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.ports import RewardFunction
from rlhf_core.rewards.contract import RewardResult
from rlhf_core.rewards.rules import BUILTIN, contains_answer, exact_match, last_number, length


def score(function, completion, answer, **options):
    (value,) = function(prompts=["?"], completions=[completion], answers=[answer], metadata=[{}], **options)
    return value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("2 + 3 = 5", "5", 1.0),
        ("The answer is 5.", "5", 1.0),
        ("5", "5.0", 1.0),
        ("5.50", "5.5", 1.0),
        ("5.05", "5.5", 0.0),
        ("about 1,234,567 people", "1234567", 1.0),
        ("1234567", "1,234,567", 1.0),
        ("1,2", "2", 1.0),
        ("1,2345", "2345", 1.0),
        ("it is -3", "-3", 1.0),
        ("it is \u22123!", "-3", 1.0),
        ("10-3", "3", 1.0),
        ("10-3", "-3", 0.0),
        ("(4)-3", "3", 1.0),
        ("x=-3", "-3", 1.0),
        ("- 5", "5", 1.0),
        ("$-7", "-7", 1.0),
        ("0.5", ".5", 1.0),
        ("is .5", "0.5", 1.0),
        ("42kg", "42", 1.0),
        ("5 then 6", "5", 0.0),
        ("007", "7", 1.0),
        ("1e9", "9", 1.0),
        ("9" * 5000, "9", 0.0),
        ("none", "5", 0.0),
        ("", "5", 0.0),
        ("5", " +5. ", 1.0),
        ("٥", "5", 0.0),
    ],
)
def test_last_number(completion, answer, value):
    assert score(last_number, completion, answer) == value


@pytest.mark.parametrize("answer", [None, "", "five", "1/2", "1 2", "5 apples", "nan", "1e5", "--5"])
def test_last_number_without_a_usable_answer_is_invalid(answer):
    result = score(last_number, "5", answer)
    assert (result.value, result.status) == (None, "invalid_data")
    assert result.error


def test_exact_match():
    assert score(exact_match, " Paris\n", "Paris") == 1.0
    assert score(exact_match, "paris", "Paris") == 0.0
    assert score(exact_match, "paris", "Paris", ignore_case=True) == 1.0
    assert score(exact_match, "x", None).status == "invalid_data"


def test_contains_answer():
    assert score(contains_answer, "It is Paris, I think", "Paris") == 1.0
    assert score(contains_answer, "15", "5") == 0.0
    assert score(contains_answer, "a+b (c)", "(c)") == 1.0
    assert score(contains_answer, "It is PARIS", "paris", ignore_case=True) == 1.0
    assert score(contains_answer, "It is PARIS", "paris") == 0.0
    assert score(contains_answer, "x", " ").status == "invalid_data"
    assert score(contains_answer, "x", None).status == "invalid_data"


def test_length():
    values = [score(length, "x" * n, None, target=10, max_penalty=2.0) for n in (0, 10, 15, 20, 500)]
    assert values == [0.0, 0.0, -1.0, -2.0, -2.0]
    for bad in ({"target": 0}, {"target": 1.5}, {"max_penalty": math.inf}, {"max_penalty": -1}):
        with pytest.raises(RewardError, match=next(iter(bad))):
            score(length, "x", None, **bad)


@pytest.mark.parametrize("function", BUILTIN.values())
def test_all_take_the_port_and_keep_their_length(function):
    reward: RewardFunction = function
    batch = {"prompts": ["?"] * 3, "completions": ["1", "2", "3"], "answers": ["1", None, "3"], "metadata": [{}] * 3}
    assert len(reward(**batch)) == 3
    assert reward(**batch) == reward(**batch)


def test_results_that_contradict_themselves():
    for value, status in ((None, "ok"), (1.0, "failed_infra"), (0.0, "invalid_data")):
        with pytest.raises(RewardError, match="a value goes with the status 'ok'"):
            RewardResult(value=value, status=status)
    with pytest.raises(RewardError, match="'good'"):
        RewardResult(value=1.0, status="good")
