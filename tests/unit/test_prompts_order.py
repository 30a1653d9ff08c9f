"""The order of prompts: exact use in every epoch, no repetition inside an iteration, purity."""

from collections import Counter

import pytest

from rlhf_core.errors import PromptError
from rlhf_core.prompts.order import prompt_rows

SHAPES = [(n, b) for n in (1, 2, 3, 5, 8, 13, 40) for b in (1, 2, 3, 4, 5, 7, 8, 16, 41)]


@pytest.mark.parametrize(("num_prompts", "per_iteration"), SHAPES)
def test_every_epoch_uses_every_prompt_once(num_prompts, per_iteration):
    iterations = max(4, 12 * num_prompts // per_iteration)
    batches = [prompt_rows(num_prompts, per_iteration, i, seed=5) for i in range(iterations)]
    stream = [row for batch in batches for row in batch]
    assert all(len(batch) == per_iteration for batch in batches)
    for start in range(0, len(stream) - num_prompts + 1, num_prompts):
        assert Counter(stream[start : start + num_prompts]) == Counter(range(num_prompts))
    if per_iteration <= num_prompts:
        assert all(len(set(batch)) == per_iteration for batch in batches)


def test_a_late_iteration_needs_no_earlier_call():
    late = prompt_rows(50, 16, 999_999, 7)
    assert late == prompt_rows(50, 16, 999_999, 7)
    assert len(set(late)) == 16
    assert len(set(prompt_rows(20, 16, 999_999, 7))) == 16


def test_epochs_and_seeds_differ():
    first, second = prompt_rows(100, 100, 0, 0), prompt_rows(100, 100, 1, 0)
    assert first != second
    assert first != prompt_rows(100, 100, 0, 1)
    assert first != list(range(100))


def test_the_order_is_frozen():
    # A resumed run relies on it: this must not change with a new NumPy or a new release.
    assert prompt_rows(10, 4, 0, 0) + prompt_rows(10, 4, 1, 0) + prompt_rows(10, 4, 2, 0) == [
        3,
        2,
        1,
        8,
        6,
        0,
        7,
        4,
        5,
        9,
        7,
        4,
    ]


def test_all_positions_are_equally_likely():
    counts = Counter(prompt_rows(7, 3, i, seed)[0] for seed in range(200) for i in range(7))
    assert all(140 <= counts[row] <= 260 for row in range(7))


def test_bad_arguments():
    with pytest.raises(PromptError, match="no prompts"):
        prompt_rows(0, 4, 0, 0)
    with pytest.raises(ValueError, match="per_iteration = 0"):
        prompt_rows(4, 0, 0, 0)
    with pytest.raises(ValueError, match="iteration = -1"):
        prompt_rows(4, 4, -1, 0)
