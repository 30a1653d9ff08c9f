"""Ragged Arrow columns as tensors and back, without copying values and without a Python loop over rows.

A ragged column of n rows is ``(values, offsets)``: all values one after another, and n + 1 int64 offsets, so row i is
``values[offsets[i]:offsets[i + 1]]``. The offsets are what variable-length attention calls ``cu_seqlens``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import torch

_LARGEST_OFFSET = 2**31 - 1  # of Arrow's list type


def flat(column: pa.ChunkedArray | pa.ListArray) -> tuple[torch.Tensor, torch.Tensor]:
    """A list column as (values, int64 offsets [n + 1]); the values keep their type.

    The values share memory with the column if it is one chunk, else the chunks are joined first. **Never write into
    them**: Arrow data is immutable and shared, and writing into a memory-mapped file kills the process. ``.clone()`` or
    ``.to(device)`` first. ValueError for null rows, null items, or more than 2**31 values (go shard by shard).
    """
    import torch

    array = _one_chunk(column)
    if array.null_count:
        raise ValueError(f"{array.null_count} rows are null: a ragged tensor has none")
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if values.null_count:
        raise ValueError(f"{values.null_count} items inside the lists are null: a ragged tensor has none")
    # DLPack, because torch.from_numpy warns about memory that must not be written
    return torch.from_dlpack(values), torch.from_numpy(offsets - offsets[0])


def ragged(values: Any, lengths: Any) -> pa.ListArray:
    """Values [sum(lengths)] and lengths [n], each a tensor, array or sequence, as a list column.

    Contiguous values on the CPU are shared, not copied: do not write into them afterwards. bool becomes uint8, since
    Arrow packs booleans into bits. ValueError if the lengths do not add up.
    """
    array, counts = _numpy(values), _numpy(lengths).astype(np.int64)
    if array.ndim != 1 or counts.ndim != 1:
        raise ValueError(
            f"values and lengths must have one dimension, they have shapes {array.shape} and {counts.shape}"
        )
    if counts.size and counts.min() < 0:
        raise ValueError(f"lengths: {counts.min()} is negative")
    total = int(counts.sum())
    if total != array.size:
        raise ValueError(f"lengths add up to {total}, but there are {array.size} values")
    if total > _LARGEST_OFFSET:
        raise ValueError(f"{total} values in one column, at most {_LARGEST_OFFSET} fit: write more shards")
    offsets = np.zeros(counts.size + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(array)))


def _one_chunk(column: pa.ChunkedArray | pa.ListArray) -> pa.ListArray:
    if not pa.types.is_list(column.type):
        raise ValueError(f"a list column is needed, this one has type {column.type}")
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    except pa.ArrowInvalid as error:
        raise ValueError(f"more than {_LARGEST_OFFSET} values in one column: go shard by shard ({error})") from None


def _numpy(values: Any) -> np.ndarray:
    detach = getattr(values, "detach", None)
    return detach().cpu().numpy() if detach is not None else np.asarray(values)
