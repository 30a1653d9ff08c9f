"""Micro-batches against a naive loop that spells out what every position is and what it may see."""

import random

import pytest
import torch

from rlhf_core.engines.rows import Batch, TokenRows, gather_rows, units_of

PAD = "pad"
PROMPT = "prompt"


def ragged(lists):
    values = torch.tensor([token for one in lists for token in one], dtype=torch.int32)
    lengths = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    return values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def token_rows(prompts, responses):
    return TokenRows(*ragged(prompts), *ragged(responses))


def random_rows(seed):
    """Groups of 1 to 4 rows with one prompt each; some responses are empty."""
    rng = random.Random(seed)
    prompts, responses, groups = [], [], []
    for group in range(rng.randint(1, 5)):
        prompt = [rng.randint(1, 99) for _ in range(rng.randint(1, 7))]
        for _ in range(rng.randint(1, 4)):
            prompts.append(prompt)
            responses.append([rng.randint(1, 99) for _ in range(rng.choice([0, 0, 1, 2, 5, 9]))])
            groups.append(group)
    return prompts, responses, torch.tensor(groups)


def naive(prompts, responses, units):
    """Per unit: tokens, positions and owners of every real place; and (place before, token) of every response token."""
    layout, predictions = [], []
    for number, unit in enumerate(units):
        tokens = list(prompts[unit[0]])
        positions, owners = list(range(len(tokens))), [PROMPT] * len(tokens)
        for row in unit:
            before = len(prompts[row]) - 1
            for place, token in enumerate(responses[row]):
                tokens.append(token)
                positions.append(len(prompts[row]) + place)
                owners.append(row)
                predictions.append((number, before, token))
                before = len(tokens) - 1
        layout.append((tokens, positions, owners))
    return layout, predictions


def assert_same(batch: Batch, prompts, responses, units):
    layout, predictions = naive(prompts, responses, units)
    width = max(len(tokens) for tokens, _, _ in layout)
    assert batch.input_ids_BT.shape == batch.position_ids_BT.shape == (len(units), width)
    assert batch.input_ids_BT.tolist() == [tokens + [0] * (width - len(tokens)) for tokens, _, _ in layout]
    for got, (_, positions, _) in zip(batch.position_ids_BT.tolist(), layout, strict=True):
        assert got[: len(positions)] == positions
        assert all(0 <= position < width for position in got)
    assert batch.targets_R.tolist() == [token for _, _, token in predictions]
    assert batch.states_R.tolist() == [unit * width + before for unit, before, _ in predictions]
    assert batch.lengths_K.tolist() == [len(responses[row]) for unit in units for row in unit]
    integers = (batch.input_ids_BT, batch.position_ids_BT, batch.states_R, batch.targets_R, batch.lengths_K)
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    owners_BT = [owners + [PAD] * (width - len(owners)) for _, _, owners in layout]
    assert_mask(batch, owners_BT, shared=any(len(unit) > 1 for unit in units))


def assert_mask(batch, owners_BT, shared):
    width = len(owners_BT[0])
    if not shared:
        assert batch.mask_B1TT is None
        # Plain causal attention is right: whatever stands before a real token is its own prompt or response.
        for owners in owners_BT:
            real = [owner for owner in owners if owner != PAD]
            assert owners[: len(real)] == real
            assert len(set(real) - {PROMPT}) <= 1
        return
    expected = [
        [
            [
                key <= query and (owners[key] == owners[query] or (owners[key] == PROMPT and owners[query] != PAD))
                for key in range(width)
            ]
            for query in range(width)
        ]
        for owners in owners_BT
    ]
    assert batch.mask_B1TT.dtype == torch.bool
    assert batch.mask_B1TT.shape == (len(owners_BT), 1, width, width)
    assert batch.mask_B1TT.squeeze(1).tolist() == expected
    assert batch.mask_B1TT.any(-1).all(), "a query without a key has a softmax of NaN"


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_batch_is_the_naive_loop(seed, share):
    prompts, responses, groups = random_rows(seed)
    rng = random.Random(seed + 1000)
    rows = rng.sample(range(len(prompts)), rng.randint(1, len(prompts)))
    units = units_of(rows, groups, share)
    assert_same(token_rows(prompts, responses).batch(units), prompts, responses, units)


@pytest.mark.parametrize(
    ("responses", "units"),
    [
        ([[7]], [[0]]),
        ([[]], [[0]]),
        ([[], []], [[0, 1]]),
        ([[], [7, 8], []], [[0, 1, 2]]),
        ([[7], [], [8]], [[2, 0], [1]]),
        ([[7, 8, 9], [4]], [[1, 0]]),
    ],
    ids=["one row", "empty row", "all empty", "empty at the ends", "single beside shared", "order of the unit"],
)
def test_corner_cases(responses, units):
    prompts = [[1, 2, 3]] * len(responses)
    assert_same(token_rows(prompts, responses).batch(units), prompts, responses, units)


def test_a_shared_batch_worked_by_hand():
    batch = token_rows([[1, 2]] * 2, [[5, 6], [7]]).batch([[0, 1]])
    assert batch.input_ids_BT.tolist() == [[1, 2, 5, 6, 7]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.states_R.tolist() == [1, 2, 1]
    assert batch.mask_B1TT.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]]
    ]


def test_no_units_give_one_row_without_response_tokens():
    batch = token_rows([[1, 2]], [[3]]).batch([])
    assert batch.input_ids_BT.shape[0] == 1
    assert batch.input_ids_BT.shape == batch.position_ids_BT.shape
    assert (batch.mask_B1TT, batch.lengths_K.tolist()) == (None, [0])
    assert batch.states_R.shape == batch.targets_R.shape == (0,)


def test_to_moves_every_tensor():
    for units in ([[0, 1]], [[0], [1]], []):
        moved = token_rows([[1, 2]] * 2, [[3], [4, 5]]).batch(units).to(torch.device("meta"))
        tensors = [value for value in vars(moved).values() if value is not None]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert (moved.mask_B1TT is None) == (units != [[0, 1]])


def test_unit_lengths_count_a_shared_prompt_once():
    rows = token_rows([[1, 2, 3]] * 3 + [[4]], [[5], [], [6, 7], [8]])
    lengths, responses = rows.unit_lengths([[0, 1, 2], [3]])
    assert (lengths.tolist(), responses.tolist()) == ([6, 2], [3, 1])
    lengths, responses = rows.unit_lengths([[0], [1], [2]])
    assert (lengths.tolist(), responses.tolist()) == ([4, 3, 5], [1, 0, 2])


@pytest.mark.parametrize("seed", range(20))
def test_unit_lengths_are_the_width_a_unit_needs_alone(seed):
    prompts, responses, groups = random_rows(seed)
    rows = token_rows(prompts, responses)
    units = units_of(list(range(len(prompts))), groups, share_prompts=True)
    widths = [rows.batch([unit]).input_ids_BT.shape[1] for unit in units]
    assert rows.unit_lengths(units)[0].tolist() == widths


def test_units_keep_the_order_of_rows():
    groups = torch.tensor([3, 3, 0, 3, 0])
    assert units_of([4, 0, 2, 3], groups, share_prompts=False) == [[4], [0], [2], [3]]
    assert units_of([4, 0, 2, 3], groups, share_prompts=True) == [[4, 2], [0, 3]]
    assert units_of([], groups, share_prompts=True) == units_of([], groups, share_prompts=False) == []


@pytest.mark.parametrize("seed", range(20))
def test_gather_rows_concatenates_rows(seed):
    _, responses, _ = random_rows(seed)
    rng = random.Random(seed)
    rows = [rng.randrange(len(responses)) for _ in range(rng.randint(0, 6))]  # repeated rows, or none at all
    got = gather_rows(*ragged(responses), rows)
    assert got.tolist() == [token for row in rows for token in responses[row]]
    assert got.dtype == torch.int32
