"""Ragged columns to tensors and back: values, edges, and that nothing is copied."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from rlhf_core.arrays import flat, ragged
from rlhf_core.buffer import decode, encode

ROWS = [[1, 2, 3], [], [4], [5, 6]]
COLUMN = pa.array(ROWS, pa.list_(pa.int32()))


def address(tensor_or_buffer):
    return tensor_or_buffer.data_ptr() if isinstance(tensor_or_buffer, torch.Tensor) else tensor_or_buffer.address


def test_flat_shares_memory_and_keeps_the_type():
    for kind in (pa.int32(), pa.float32(), pa.uint8(), pa.int64()):
        column = pa.array(ROWS, pa.list_(kind))
        values, offsets = flat(column)
        assert values.tolist() == [1, 2, 3, 4, 5, 6]
        assert offsets.tolist() == [0, 3, 3, 4, 6]
        assert offsets.dtype == torch.int64
        assert address(values) == address(column.values.buffers()[1])
        assert str(values.dtype) == f"torch.{str(kind).replace('float', 'float32')}"


def test_flat_of_decoded_read_only_memory():
    table = decode(encode(pa.table({"x": COLUMN})))
    values, _ = flat(table["x"])
    assert values.tolist() == [1, 2, 3, 4, 5, 6]
    assert address(values) == address(table["x"].chunk(0).values.buffers()[1])
    del table  # the tensor keeps the memory alive
    assert values.sum() == 21


def test_flat_of_slices_chunks_and_nothing():
    assert [part.tolist() for part in flat(COLUMN.slice(1, 2))] == [[4], [0, 0, 1]]
    chunked = pa.chunked_array([COLUMN.slice(2), COLUMN.slice(0, 1)])
    assert [part.tolist() for part in flat(chunked)] == [[4, 5, 6, 1, 2, 3], [0, 1, 3, 6]]
    for empty in (pa.chunked_array([], COLUMN.type), COLUMN.slice(0, 0), pa.array([[]], COLUMN.type)):
        values, offsets = flat(empty)
        assert values.tolist() == []
        assert offsets.tolist() == [0] * (len(empty) + 1)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], None], pa.list_(pa.int32())), "1 rows are null"),
        (pa.array([[1, None]], pa.list_(pa.int32())), "1 items inside"),
        (pa.array([1, 2]), "list column is needed"),
    ],
)
def test_flat_refuses(column, message):
    with pytest.raises(ValueError, match=message):
        flat(column)


def test_ragged_is_the_inverse_and_shares_memory():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    column = ragged(values, torch.tensor([3, 0, 1, 2]))
    assert column.type == pa.list_(pa.float32())
    assert column.to_pylist() == [[1, 2, 3], [], [4], [5, 6]]
    assert address(column.values.buffers()[1]) == address(values)
    again, offsets = flat(column)
    assert address(again) == address(values)
    assert offsets.tolist() == [0, 3, 3, 4, 6]


def test_ragged_takes_what_trainers_have():
    with_gradient = torch.ones(3, requires_grad=True)
    assert ragged(with_gradient, [1, 2]).to_pylist() == [[1.0], [1.0, 1.0]]
    assert ragged(torch.tensor([True, False]), [2]).type == pa.list_(pa.uint8())
    assert ragged(torch.arange(6)[::2], [3]).to_pylist() == [[0, 2, 4]]
    assert ragged(np.zeros(0, np.float32), []).to_pylist() == []
    assert ragged(np.zeros(0, np.float32), [0, 0]).to_pylist() == [[], []]


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [([1, 2], [1], "add up to 1"), ([1], [2, -1], "negative"), ([[1]], [1], "one dimension")],
)
def test_ragged_refuses(values, lengths, message):
    with pytest.raises(ValueError, match=message):
        ragged(np.array(values), lengths)
