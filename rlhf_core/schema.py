"""The Arrow schemas of rollouts and their column groups, and the check that a table keeps its schema.

One row is one sample. ``sample_id`` is in every column group and ties them together. Columns that are not marked
nullable hold no nulls. ``T`` is the number of response tokens of the row; all its per-token lists have that length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.layout import check_name

#: In the metadata of every file. A reader refuses another number.
SCHEMA_VERSION = 1
VERSION_KEY = b"rollout.schema_version"
#: Prefix of the columns of the reward's components.
COMPONENT = "component/"
#: What a reward can be. Missing is not zero: only ``ok`` has a value.
REWARD_STATUSES = ("ok", "failed_infra", "invalid_data")
#: Lists with one item a response token.
PER_TOKEN = ("response_ids", "logprobs", "old_logprobs", "ref_logprobs", "advantages")
#: Columns of rollouts that older versions wrote and nobody reads.
DEPRECATED = ("action_mask", "queued_seconds")

_METADATA = {VERSION_KEY: str(SCHEMA_VERSION).encode()}


def _column(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


#: What the engines produced.
ROLLOUTS = pa.schema(
    [
        _column("sample_id", pa.string()),
        _column("prompt_id", pa.string()),
        _column("group", pa.int32()),  # index of the prompt in the iteration
        _column("sample", pa.int32()),  # index inside the group
        _column("prompt_ids", pa.list_(pa.int32())),
        _column("response_ids", pa.list_(pa.int32())),  # [T]
        _column("logprobs", pa.list_(pa.float32())),  # [T] of the sampled tokens, after temperature
        _column("policy_version", pa.int32()),
        _column("attempt", pa.string()),
        _column("engine", pa.string()),
        _column("finish_reason", pa.string()),
        _column("seconds", pa.float32()),  # from the request to the last token
    ],
    metadata=_METADATA,
)


def rewards_schema(component_names: Sequence[str]) -> pa.Schema:
    """The column group of the ``score`` stage, with a nullable float32 column ``component/NAME`` for each component.

    ``reward`` is null unless ``status`` is ``ok``. ValueError for a component name that is no simple name or doubled.
    """
    names = [check_name(name, "reward component") for name in component_names]
    if len(set(names)) != len(names):
        raise ValueError(f"reward components {names}: a name is there twice")
    return pa.schema(
        [
            _column("sample_id", pa.string()),
            _column("reward", pa.float32(), nullable=True),
            _column("status", pa.string()),
            _column("error", pa.string(), nullable=True),
            _column("response_text", pa.string()),
            *(_column(f"{COMPONENT}{name}", pa.float32(), nullable=True) for name in names),
        ],
        metadata=_METADATA,
    )


def experience_schema(reference: bool) -> pa.Schema:
    """The column group of the ``advantages`` stage; ``ref_logprobs`` only where there is a reference model."""
    per_token = ["old_logprobs", *(["ref_logprobs"] if reference else []), "advantages"]
    return pa.schema(
        [_column("sample_id", pa.string()), *(_column(name, pa.list_(pa.float32())) for name in per_token)],
        metadata=_METADATA,
    )


def without_deprecated(rollouts: pa.Table) -> pa.Table:
    """Stored rollouts of any version with the columns of this one."""
    return rollouts.drop_columns([name for name in DEPRECATED if name in rollouts.column_names])


def check_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return ``table`` if it keeps ``schema``: version, columns and their order, types, nulls, lengths, values.

    All per-token lists that the table has must agree in length in every row, ``sample_id`` is unique, and a row has a
    finite reward exactly where its status is ``ok``. Vectorised: no Python loop over rows or tokens. ValueError names the
    column, what was expected and what was found.
    """
    _check_version(table)
    _check_columns(table, schema)
    for field in schema:
        _check_nulls(table[field.name], field)
    _check_unique(table["sample_id"])
    _check_lengths(table, [name for name in PER_TOKEN if name in schema.names])
    if {"reward", "status"} <= set(schema.names):
        _check_rewards(table)
    return table


def _check_version(table: pa.Table) -> None:
    found = (table.schema.metadata or {}).get(VERSION_KEY)
    if found != _METADATA[VERSION_KEY]:
        raise ValueError(
            f"schema metadata {VERSION_KEY.decode()}: expected {SCHEMA_VERSION}, "
            f"found {found.decode(errors='replace') if found is not None else None}; build the table with the schema"
        )


def _check_columns(table: pa.Table, schema: pa.Schema) -> None:
    for name in schema.names:
        count = table.column_names.count(name)
        if count != 1:
            raise ValueError(f"column {name!r}: expected once, found {count} times in {table.column_names}")
    extra = [name for name in table.column_names if name not in schema.names]
    if extra:
        raise ValueError(f"column {extra[0]!r}: not in the schema; expected the columns {schema.names}")
    if table.column_names != schema.names:
        raise ValueError(f"column order: expected {schema.names}, found {table.column_names}")
    for field in schema:
        found = table.schema.field(field.name).type
        if found != field.type:
            raise ValueError(f"column {field.name!r}: expected type {field.type}, found {found}")


def _check_nulls(column: pa.ChunkedArray, field: pa.Field) -> None:
    if not field.nullable and column.null_count:
        first = pc.index(pc.is_null(column), True).as_py()
        raise ValueError(f"column {field.name!r}: expected no nulls, found {column.null_count}, first in row {first}")
    if pa.types.is_list(field.type):
        inside = pc.list_flatten(column).null_count
        if inside:
            raise ValueError(f"column {field.name!r}: expected no nulls inside the lists, found {inside}")


def _check_unique(column: pa.ChunkedArray) -> None:
    distinct = pc.count_distinct(column).as_py()
    if distinct != len(column):
        counts = pc.value_counts(column)
        doubled = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        raise ValueError(
            f"column 'sample_id': expected {len(column)} distinct ids, found {distinct}: {doubled[0]} again"
        )


def _check_lengths(table: pa.Table, names: Sequence[str]) -> None:
    if not names:
        return
    expected = pc.list_value_length(table[names[0]])
    for name in names[1:]:
        found = pc.list_value_length(table[name])
        differs = pc.not_equal(expected, found)
        row = pc.index(differs, True).as_py()
        if row >= 0:
            raise ValueError(
                f"column {name!r}: expected {expected[row]} items in row {row} (sample {table['sample_id'][row]}), "
                f"as many as in {names[0]!r}, found {found[row]}"
            )


def _check_rewards(table: pa.Table) -> None:
    status, reward = table["status"], table["reward"]
    known = pc.is_in(status, value_set=pa.array(REWARD_STATUSES))
    _refuse_first(table, pc.invert(known), "status", f"one of {', '.join(REWARD_STATUSES)}")
    ok = pc.equal(status, "ok")
    finite = pc.fill_null(pc.is_finite(reward), False)
    _refuse_first(table, pc.and_(ok, pc.invert(finite)), "reward", "a finite number where status is 'ok'")
    _refuse_first(table, pc.and_not(pc.is_valid(reward), ok), "reward", "null where status is not 'ok'")


def _refuse_first(table: pa.Table, bad: Any, name: str, expected: str) -> None:
    row = pc.index(bad, True).as_py()
    if row >= 0:
        sample = table["sample_id"][row]
        raise ValueError(
            f"column {name!r}: expected {expected}, found {table[name][row]} in row {row} (sample {sample})"
        )
