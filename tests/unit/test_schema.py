"""The Arrow schemas and what check_table refuses."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from rlhf_core.schema import DEPRECATED, ROLLOUTS, check_table, experience_schema, rewards_schema, without_deprecated

GOOD_ROLLOUTS = {
    "sample_id": ["a", "b"],
    "prompt_id": ["p", "p"],
    "group": [0, 0],
    "sample": [0, 1],
    "prompt_ids": [[1], [1]],
    "response_ids": [[5, 6], []],
    "logprobs": [[-0.5, -1.0], []],
    "policy_version": [0, 0],
    "attempt": ["x", "x"],
    "engine": ["e", "e"],
    "finish_reason": ["stop", "length"],
    "seconds": [1.0, 2.0],
}
GOOD_REWARDS = {
    "sample_id": ["a", "b", "c"],
    "reward": [0.0, None, None],
    "status": ["ok", "failed_infra", "invalid_data"],
    "error": [None, "timeout", "no answer"],
    "response_text": ["x", "y", "z"],
    "component/exact": [1.0, None, None],
}
REWARDS = rewards_schema(["exact"])


def rollouts(**columns):
    return pa.table({**GOOD_ROLLOUTS, **columns}, schema=ROLLOUTS)


def rewards(**columns):
    return pa.table({**GOOD_REWARDS, **columns}, schema=REWARDS)


def test_good_tables_pass():
    for table, schema in ((rollouts(), ROLLOUTS), (rewards(), REWARDS), (ROLLOUTS.empty_table(), ROLLOUTS)):
        assert check_table(table, schema) is table
        chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
        assert check_table(chunked, schema) is chunked


def test_columns_of_older_versions_are_left_out():
    old = rollouts()
    for name in DEPRECATED:
        old = old.append_column(name, pa.nulls(2))
    with pytest.raises(ValueError, match=f"{DEPRECATED[0]!r}: not in the schema"):
        check_table(old, ROLLOUTS)
    assert check_table(without_deprecated(old), ROLLOUTS).equals(rollouts())
    assert without_deprecated(rollouts()).equals(rollouts())


def test_schemas_are_the_documented_ones():
    assert str(ROLLOUTS.field("logprobs").type) == "list<item: float>"
    assert [field.name for field in ROLLOUTS if field.nullable] == []
    assert rewards_schema(["a", "b"]).names[-2:] == ["component/a", "component/b"]
    assert experience_schema(True).names == ["sample_id", "old_logprobs", "ref_logprobs", "advantages"]
    assert experience_schema(False).names == ["sample_id", "old_logprobs", "advantages"]
    for schema in (ROLLOUTS, REWARDS, experience_schema(True)):
        assert schema.metadata == {b"rollout.schema_version": b"1"}


@pytest.mark.parametrize("names", [["a/b"], [""], ["a", "a"], ["../x"]])
def test_component_names_are_checked(names):
    with pytest.raises(ValueError, match="component"):
        rewards_schema(names)


def replaced(name, column):
    table = rollouts()
    return table.set_column(table.column_names.index(name), name, column)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (rollouts().drop_columns(["engine"]), "'engine': expected once, found 0 times"),
        (rollouts().append_column("x", pa.array([1, 2])), "'x': not in the schema"),
        (rollouts().append_column("group", pa.array([1, 2])), "'group': expected once, found 2 times"),
        (rollouts().select(ROLLOUTS.names[::-1]), "column order"),
        (replaced("group", pa.array([0, 0], pa.int64())), "'group': expected type int32, found int64"),
        (
            replaced("logprobs", pa.array([[0.0], []])),
            "'logprobs': expected type list<item: float>, found list<item: double>",
        ),
        (rollouts().replace_schema_metadata({}), "schema_version: expected 1, found None"),
        (rollouts().replace_schema_metadata({"rollout.schema_version": "2"}), "schema_version: expected 1, found 2"),
        (replaced("engine", pa.array(["e", None])), "'engine': expected no nulls, found 1, first in row 1"),
        (
            replaced("response_ids", pa.array([[1, None], []], pa.list_(pa.int32()))),
            "'response_ids': .* inside the lists",
        ),
        (rollouts(sample_id=["a", "a"]), "'sample_id': expected 2 distinct ids, found 1: a again"),
        (rollouts(logprobs=[[-0.5, -1.0], [0.0]]), r"'logprobs': expected 0 items in row 1 \(sample b\), .* found 1"),
    ],
)
def test_bad_rollouts(table, message):
    with pytest.raises(ValueError, match=message):
        check_table(table, ROLLOUTS)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"status": ["ok", "failed", "invalid_data"]}, "'status': expected one of ok, .* found failed in row 1"),
        ({"reward": [None, None, None]}, "'reward': expected a finite number .* found None in row 0"),
        ({"reward": [math.nan, None, None]}, "'reward': expected a finite number .* found nan"),
        ({"reward": [1.0, 0.0, None]}, r"'reward': expected null .* found 0.0 in row 1 \(sample b\)"),
    ],
)
def test_missing_is_not_zero(columns, message):
    with pytest.raises(ValueError, match=message):
        check_table(rewards(**columns), REWARDS)


def test_experience_lengths():
    schema = experience_schema(True)
    good = {"sample_id": ["a"], "old_logprobs": [[0.0]], "ref_logprobs": [[0.0]], "advantages": [[1.0]]}
    check_table(pa.table(good, schema=schema), schema)
    for name in ("ref_logprobs", "advantages"):
        with pytest.raises(ValueError, match=f"'{name}': expected 1 items in row 0"):
            check_table(pa.table({**good, name: [[0.0, 0.0]]}, schema=schema), schema)
