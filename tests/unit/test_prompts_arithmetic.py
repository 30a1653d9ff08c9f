"""Generated arithmetic prompts."""

import re

import pytest

from rlhf_core.config.data import ArithmeticConfig, PromptsConfig
from rlhf_core.errors import PromptError
from rlhf_core.prompts.arithmetic import MAX_PROMPTS, arithmetic_rows
from rlhf_core.prompts.source import load_prompts


def test_plain_prompts_cover_all_pairs():
    rows = arithmetic_rows(ArithmeticConfig(), seed=0)
    wanted = {
        (f"What is {a} + {b}? Answer with just the number.", str(a + b)) for a in range(1, 10) for b in range(1, 10)
    }
    assert len(rows) == 81
    assert {(r["prompt"], r["answer"]) for r in rows} == wanted


def test_the_seed_decides_the_order():
    config = ArithmeticConfig()
    assert arithmetic_rows(config, 3) == arithmetic_rows(config, 3)
    one, two = arithmetic_rows(config, 3), arithmetic_rows(config, 4)
    assert one != two
    assert sorted(r["prompt"] for r in one) == sorted(r["prompt"] for r in two)


@pytest.mark.parametrize("style", ["plain", "word", "mixed"])
def test_answers_are_right_and_never_negative(style):
    config = ArithmeticConfig(low=0, high=6, operations=("+", "-", "*"), style=style)
    rows = arithmetic_rows(config, seed=1)
    wordings = {"plain": 1, "word": 4, "mixed": 5}[style]
    assert len(rows) == (49 + 28 + 49) * wordings
    assert len({r["prompt"] for r in rows}) == len(rows)
    for row in rows:
        left, right = row["left"], row["right"]
        assert 0 <= left <= 6
        assert 0 <= right <= 6
        assert int(row["answer"]) == {"+": left + right, "-": left - right, "*": left * right}[row["operation"]] >= 0
        assert sorted(map(int, re.findall(r"\d+", row["prompt"]))) == sorted((left, right))
        assert row["prompt"].endswith("? Answer with just the number.")
        assert not re.search(r"\b1 (?!more|on|of|out|get|[-+*])\w*?s\b", row["prompt"])
    assert {r["style"] for r in rows} == ({"plain", "word"} if style == "mixed" else {style})


def test_large_ranges_are_sampled():
    config = ArithmeticConfig(low=0, high=10_000, operations=("+", "-", "*"), style="mixed")
    rows = arithmetic_rows(config, seed=0)
    assert len(rows) == MAX_PROMPTS
    assert len({r["prompt"] for r in rows}) == MAX_PROMPTS
    assert {r["operation"] for r in rows} == {"+", "-", "*"}
    assert max(r["left"] for r in rows) > 9_900
    assert all(r["left"] >= r["right"] for r in rows if r["operation"] == "-")
    assert rows == arithmetic_rows(config, seed=0)
    assert rows != arithmetic_rows(config, seed=1)


@pytest.mark.parametrize("high", [63, 64, 89])
def test_around_the_cap(high):
    config = ArithmeticConfig(low=0, high=high)
    assert len({r["prompt"] for r in arithmetic_rows(config, 0)}) == min(MAX_PROMPTS, (high + 1) ** 2)


def test_odd_ranges():
    assert len(arithmetic_rows(ArithmeticConfig(low=5, high=5, operations=("-", "-")), 0)) == 1
    with pytest.raises(PromptError, match="low = 9 is above"):
        arithmetic_rows(ArithmeticConfig(low=9, high=3), 0)


def test_as_a_prompt_source():
    prompts = load_prompts(PromptsConfig(prompt_column="other"), seed=0)
    assert len({p.prompt_id for p in prompts}) == 81
    first = prompts[0]
    assert first.metadata == {
        "operation": "+",
        "left": first.metadata["left"],
        "right": first.metadata["right"],
        "style": "plain",
    }
    assert first.answer == str(first.metadata["left"] + first.metadata["right"])
