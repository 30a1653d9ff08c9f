"""Rows that show faults, and the bound between rounding and a fault."""

import numpy as np
import pytest

from rlhf_core.algorithms.parity import FLOAT32, Gap, bound, gap, parity_rows

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]


def test_rows_are_whole_groups_whose_samples_differ():
    rows = parity_rows(PROMPTS, samples=3, context=100, window=None)
    assert rows.groups == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert [list(p) for p in rows.prompts[::3]] == PROMPTS
    assert len(set(rows.responses)) == 9
    assert len({len(response) for response in rows.responses[:3]}) == 3
    assert {token for response in rows.responses for token in response} <= set(range(1, 11))
    assert rows == parity_rows(PROMPTS, samples=3, context=100, window=None), "the same run gives the same rows"


@pytest.mark.parametrize(
    ("window", "context", "longest"), [(40, 100, 40), (None, 100, 5), (90, 100, 5), (5000, 9000, 5)]
)
def test_a_window_inside_the_context_is_filled_by_a_prompt(window, context, longest):
    rows = parity_rows(PROMPTS, samples=2, context=context, window=window)
    assert max(map(len, rows.prompts)) == longest
    assert all(len(sequence) <= context for sequence in rows.sequences)


@pytest.mark.parametrize("context", [40, 12, 2])
def test_prompts_leave_room_for_a_response(context):
    rows = parity_rows([list(range(50))], samples=3, context=context, window=None)
    assert max(map(len, rows.sequences)) == context
    assert min(map(len, rows.prompts)) >= 1
    assert min(map(len, rows.responses)) >= 1


def test_a_fault_in_one_row_is_seen():
    truth = [np.zeros(10), np.zeros(30)]
    found = gap([np.full(10, 0.4), np.zeros(29)], truth)
    assert found.worst == pytest.approx(0.4)
    assert found.mean == pytest.approx(4 / 39)
    assert not found.within(Gap(0.2, 0.3))
    assert not found.within(Gap(0.1, 0.5))
    assert found.within(Gap(0.2, 0.5))
    assert not Gap(float("nan"), 0.0).within(Gap(1.0, 1.0))


def test_the_bound_follows_the_models_own_rounding():
    yardstick = Gap(0.02, 0.05)
    assert bound("float32", Gap(0.0, 0.0), None).mean == FLOAT32
    derived = bound("bfloat16", yardstick, None)
    assert yardstick.mean < derived.mean < 0.1
    assert yardstick.worst < derived.worst <= 0.1
    assert bound("bfloat16", Gap(0.0, 0.0), None).mean > 0, "a tiny model rounds next to nothing"
    assert bound("bfloat16", yardstick, 0.5).mean == 0.5
