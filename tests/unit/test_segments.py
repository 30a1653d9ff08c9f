"""Segments: written while an engine goes on, found by the next attempt, committed and read in the order of the groups."""

from __future__ import annotations

import errno
import logging
import random
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.arrays import ragged
from rlhf_core.buffer import StageWriter, commit_stage, find_stage, load_stage, read_rows, read_shard
from rlhf_core.errors import CorruptObject
from rlhf_core.manifests import StageManifest
from rlhf_core.metrics import values
from rlhf_core.schema import DEPRECATED, ROLLOUTS, rewards_schema, without_deprecated
from rlhf_core.segments import find_segments, prepare_segment, request_identity, rollout_metrics

RUN, ITERATION, SIZE = "r", 4, 3
IDENTITY = request_identity(rows=[1, 2], seed=0)


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


def rollouts(groups, size=SIZE, attempt="a1"):
    """Whole groups one after another; what a row holds follows from its group and sample alone."""
    keys = [(group, sample) for group in groups for sample in range(size)]
    lengths = [random.Random(group * 100 + sample).randrange(0, 6) for group, sample in keys]
    tokens = sum(lengths)
    columns = {
        "sample_id": [f"{group:05d}-{sample:03d}" for group, sample in keys],
        "prompt_id": [f"p{group}" for group, _ in keys],
        "group": [group for group, _ in keys],
        "sample": [sample for _, sample in keys],
        "prompt_ids": [[1, group] for group, _ in keys],
        "response_ids": ragged(np.arange(tokens, dtype=np.int32), lengths),
        "logprobs": ragged(-np.ones(tokens, dtype=np.float32), lengths),
        "policy_version": [ITERATION] * len(keys),
        "attempt": [attempt] * len(keys),
        "engine": ["e0"] * len(keys),
        "finish_reason": ["stop" if sample else "length" for _, sample in keys],
        "seconds": [0.5] * len(keys),
    }
    return pa.table(columns, schema=ROLLOUTS)


def deprecated(table):
    """The same rollouts with the columns that older versions wrote."""
    lengths = pc.list_value_length(table["response_ids"]).to_numpy()
    mask = ragged(np.ones(lengths.sum(), dtype=np.uint8), lengths)
    seconds = pa.nulls(table.num_rows, pa.float32())
    return table.add_column(7, "action_mask", mask).add_column(12, "queued_seconds", seconds)


def write_deprecated(store, groups, attempt="a1"):
    marked = deprecated(rollouts(groups, attempt=attempt)).replace_schema_metadata(
        {**ROLLOUTS.metadata, b"rlhf.request": IDENTITY.encode()}
    )
    shard, data = StageWriter(store, RUN, ITERATION, "generate", attempt).prepare(marked, 0, groups)
    store.put(shard.key, data)
    return shard


def write(store, groups, attempt="a1", identity=IDENTITY, size=SIZE):
    shard, data = prepare_segment(
        StageWriter(store, RUN, ITERATION, "generate", attempt), rollouts(groups, size, attempt), identity
    )
    store.put(shard.key, data)
    return shard


def manifest(stage, shards, parents=()):
    return StageManifest(
        run=RUN,
        iteration=ITERATION,
        stage=stage,
        attempt="a1",
        policy_version=ITERATION,
        parents={parent.stage: parent.digest for parent in parents},
        shards=tuple(shards),
    )


def commit(store, stage, shards, parents=()):
    return commit_stage(store, manifest(stage, shards, parents))[0]


def found(store, identity=IDENTITY, **known):
    return find_segments(store, RUN, ITERATION, identity, **known)


def test_what_was_written_is_found_again(store):
    assert found(store) == []
    written = [write(store, [5, 2]), write(store, [0], attempt="a2")]
    segments = found(store)
    assert {s.shard.groups: s.shard.key for s in segments} == {shard.groups: shard.key for shard in written}
    for segment in segments:
        table = read_shard(store, segment.shard)
        assert table.replace_schema_metadata(None).equals(
            rollouts(
                segment.shard.groups, attempt="a1" if 5 in segment.shard.groups else "a2"
            ).replace_schema_metadata()
        )
        assert values(segment.metrics) == values(rollout_metrics(table))
        assert values(segment.metrics)["generate/truncated_fraction"] == pytest.approx(1 / SIZE)
    by_key = {shard.key: shard for shard in written}
    for segment in segments:  # all that a reader checks, as the writer knew it
        assert segment.shard.model_copy(update={"first_row": 0}) == by_key[segment.shard.key].model_copy(
            update={"first_row": 0}
        )


def test_segments_of_one_attempt_with_the_same_first_group_have_keys_of_their_own(store):
    assert write(store, [1, 2]).key != write(store, [1, 3]).key
    assert write(store, [1, 2]).key == write(store, [1, 2]).key


def test_only_the_same_request_counts(store):
    write(store, [0], identity=request_identity(rows=[1, 2], seed=1))
    mine = write(store, [1])
    assert [s.shard.key for s in found(store)] == [mine.key]
    assert request_identity(a=1, b=[2]) == request_identity(b=[2], a=1)
    assert request_identity(a=1) != request_identity(a=2)


def test_other_places_do_not_count(store):
    for run, iteration, stage in (("r2", ITERATION, "generate"), (RUN, 5, "generate"), (RUN, ITERATION, "score")):
        shard, data = prepare_segment(StageWriter(store, run, iteration, stage, "a1"), rollouts([0]), IDENTITY)
        store.put(shard.key, data)
    assert found(store) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "rename", "garbage"])
def test_a_damaged_segment_is_left_out_with_a_warning(store, caplog, damage):
    good, bad = write(store, [0]), write(store, [1])
    data = bytearray(store.get(bad.key))
    key = bad.key
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-1]
    elif damage == "empty":
        data = bytearray()
    elif damage == "rename":
        key = key.replace(bad.blake3[:16], "0" * 16)
        store.delete([bad.key])
    else:
        data = bytearray(b"something else")
    store.put(key, bytes(data))
    with caplog.at_level(logging.WARNING):
        assert [s.shard.key for s in found(store)] == [good.key]
    (warning,) = caplog.records
    assert key in warning.getMessage()
    assert "generated again" in warning.getMessage()


def test_what_the_store_calls_damaged_is_left_out_too(tmp_path, caplog):
    class Checking(LocalObjectStore):
        error = errno.EBADMSG

        def get(self, key):
            if key == bad.key:
                raise OSError(self.error, "checksum")
            return super().get(key)

    store = Checking(tmp_path)
    good, bad = write(store, [0]), write(store, [1])
    assert [s.shard.key for s in found(store)] == [good.key]
    assert bad.key in caplog.text
    Checking.error = errno.EIO
    with pytest.raises(OSError, match="checksum"):  # a store that fails is not a segment that is damaged
        found(store)


def test_a_segment_that_is_deleted_meanwhile_is_not_there(tmp_path):
    class Listing(LocalObjectStore):
        def list(self, prefix):
            return [*super().list(prefix), f"{prefix}/a9/00000000-{'0' * 16}.arrow"]

    store = Listing(tmp_path)
    shard = write(store, [3])
    assert [s.shard.key for s in found(store)] == [shard.key]


def test_no_group_twice(store):
    one, other = write(store, [1, 2], attempt="a1"), write(store, [2, 3], attempt="a2")
    apart = write(store, [4], attempt="a3")
    assert [s.shard.key for s in found(store)] == [one.key, apart.key]
    # What the caller has already must not hide what else there is.
    assert [s.shard.key for s in found(store, known=[1])] == [other.key, apart.key]
    assert found(store, known=[2, 4]) == []


@pytest.mark.parametrize(("order", "group"), [([0, 1, 3, 4, 5, 2], 1), ([3, 0, 4, 1, 5, 2], 2)])
def test_a_group_in_two_places(store, order, group):
    writer = StageWriter(store, RUN, ITERATION, "generate", "a1")
    with pytest.raises(ValueError, match=f"group {group} of a segment is in two places"):
        prepare_segment(writer, rollouts([1, 2]).take(order), IDENTITY)


def test_groups_of_different_sizes(store):
    writer = StageWriter(store, RUN, ITERATION, "generate", "a1")
    with pytest.raises(ValueError, match=r"different sizes: \{0: 3, 1: 2\}"):
        prepare_segment(writer, rollouts([0, 1]).slice(0, 5), IDENTITY)
    with pytest.raises(ValueError, match="prompt_ids"):
        prepare_segment(writer, rollouts([0]).drop_columns(["prompt_ids"]), IDENTITY)
    parts = [write(store, [0]), write(store, [1], size=2)]
    with pytest.raises(ValueError, match="different sizes"):
        commit_stage(store, manifest("generate", parts))
    uneven = write(store, [0, 1]).model_copy(update={"rows": 5})
    with pytest.raises(ValueError, match="different sizes"):
        commit_stage(store, manifest("generate", [uneven]))
    assert find_stage(store, RUN, ITERATION, "generate") is None


GROUPS = 8
CUTS = [[6, 0], [3], [5, 1, 7], [4, 2]]


@pytest.fixture(params=range(3))
def generated(request, store):
    """The stage, committed with its segments in some order."""
    shards = [write(store, groups) for groups in CUTS]
    random.Random(request.param).shuffle(shards)
    return commit(store, "generate", shards)


@pytest.fixture
def whole():
    """The rows as a run without streaming would have them."""
    return rollouts(range(GROUPS))


def everything_but_tokens(table):
    """``response_ids`` count over a segment, so a row's differ from those of the whole; its length does not."""
    return table.replace_schema_metadata(None).drop_columns(["response_ids"])


def test_a_stage_is_committed_in_the_order_of_its_groups(store, generated):
    assert [shard.groups[0] for shard in generated.shards] == [3, 4, 5, 6]
    assert [shard.first_row for shard in generated.shards] == [0, 3, 9, 18]
    assert generated.rows == GROUPS * SIZE
    assert load_stage(store, RUN, ITERATION, "generate") == generated


def test_rows_come_in_the_order_of_the_groups(store, generated, whole):
    for rows in (None, *(range(a, b) for a in range(GROUPS * SIZE + 1) for b in range(a, GROUPS * SIZE + 1))):
        read = read_rows(store, [generated], rows=rows)
        part = whole if rows is None else whole.slice(rows.start, len(rows))
        assert everything_but_tokens(read).equals(everything_but_tokens(part)), rows
    with pytest.raises(ValueError, match="rows"):
        read_rows(store, [generated], rows=range(0, GROUPS * SIZE + 1))


def test_only_segments_that_hold_the_rows_are_fetched(store, generated):
    damaged = next(shard for shard in generated.shards if 6 in shard.groups)
    store.put(damaged.key, b"damaged")
    read = read_rows(store, [generated], columns=["group"], rows=range(SIZE, 6 * SIZE))
    assert read["group"].to_pylist() == [group for group in range(1, 6) for _ in range(SIZE)]
    for rows in (range(0, 1), range(SIZE - 1, SIZE), range(7 * SIZE - 1, 7 * SIZE)):
        with pytest.raises(CorruptObject, match=damaged.blake3[:16]):
            read_rows(store, [generated], rows=rows)


def test_a_segment_under_the_name_of_another_is_not_read(store, generated):
    one, other = generated.shards[1], generated.shards[3]
    store.put(one.key, store.get(other.key))
    with pytest.raises(CorruptObject, match=one.blake3[:16]):
        read_rows(store, [generated])


@pytest.mark.parametrize("cuts", [[], [7], [1, 2, 20], [3, 6, 9, 12]])
def test_a_later_column_group_is_merged_by_position(store, generated, whole, cuts):
    ids = whole["sample_id"].to_pylist()
    schema = rewards_schema(["exact"])
    columns = {
        "sample_id": ids,
        "reward": [float(row) for row in range(len(ids))],
        "status": ["ok"] * len(ids),
        "error": [None] * len(ids),
        "response_text": ["text"] * len(ids),
        "component/exact": [None] * len(ids),
    }
    table = pa.table(columns, schema=schema)
    writer = StageWriter(store, RUN, ITERATION, "score", "a1")
    shards = [writer.write_shard(table.slice(a, b - a), a) for a, b in pairwise([0, *cuts, len(ids)])]
    scored = commit(store, "score", shards, [generated])
    for rows in (range(len(ids)), range(0, 1), range(4, 11), range(2, 3), range(20, 24), range(9, 9)):
        merged = read_rows(store, [generated, scored], columns=["sample_id", "group", "reward"], rows=rows)
        assert merged["sample_id"].to_pylist() == ids[rows.start : rows.stop]
        assert merged["reward"].to_pylist() == [float(row) for row in rows]
        assert merged["group"].to_pylist() == [row // SIZE for row in rows]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([[1], [2]], "group 0 is missing"),
        ([[0, 1], [3]], "group 2 is missing"),
        ([[0, 1], [1, 2]], "group 1 is there twice"),
        ([[0], [1], [0]], "group 0 is there twice"),
    ],
)
def test_missing_and_doubled_groups_are_refused(store, cuts, message):
    shards = [write(store, groups, attempt=f"a{n}") for n, groups in enumerate(cuts)]
    with pytest.raises(ValueError, match=message):
        commit_stage(store, manifest("generate", shards))
    assert find_stage(store, RUN, ITERATION, "generate") is None


def test_shards_without_groups_do_not_mix_with_segments(store):
    plain = StageWriter(store, RUN, ITERATION, "generate", "a1").write_shard(rollouts([1]), 0)
    with pytest.raises(ValueError, match=f"{plain.blake3[:16]}.* names no groups"):
        commit_stage(store, manifest("generate", [write(store, [0]), plain]))


def test_segments_that_are_found_can_be_committed(store):
    write(store, [2, 0], attempt="killed")
    taken = [segment.shard for segment in found(store)]
    stage = commit(store, "generate", [write(store, [1], attempt="next"), *taken])
    read = read_rows(store, [stage], columns=["group", "sample", "attempt"])
    assert read["group"].to_pylist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert read["sample"].to_pylist() == [0, 1, 2] * 3
    assert read["attempt"].to_pylist() == ["killed"] * 3 + ["next"] * 3 + ["killed"] * 3
    folder = layout.stage_data(RUN, ITERATION, "generate")
    assert sorted(shard.key for shard in stage.shards) == store.list(folder)


def test_segments_of_an_older_version_are_taken_over_and_read_together_with_new_ones(store, whole):
    write_deprecated(store, [6, 0, 3], attempt="old")
    taken = found(store)
    assert [segment.shard.groups for segment in taken] == [(6, 0, 3)]
    assert values(taken[0].metrics) == values(rollout_metrics(rollouts([6, 0, 3])))
    new = [write(store, groups, attempt="new") for groups in ([5, 1], [4, 7, 2])]
    stage = commit(store, "generate", [*new, *(segment.shard for segment in taken)])
    without_attempt = everything_but_tokens(whole).drop_columns(["attempt"])
    for rows in (range(GROUPS * SIZE), range(2, 5), range(SIZE), range(4, 4)):
        read = read_rows(store, [stage], rows=rows)
        assert set(DEPRECATED).isdisjoint(read.column_names) or rows == range(SIZE)  # of group 0 alone: as it lies
        part = without_attempt.slice(rows.start, len(rows))
        assert everything_but_tokens(without_deprecated(read)).drop_columns(["attempt"]).equals(part)
        assert read_rows(store, [stage], columns=["logprobs"], rows=rows)["logprobs"].equals(part["logprobs"])
    with pytest.raises(ValueError, match=r"\['action_mask'\] are not in the stages generate"):
        read_rows(store, [stage], columns=["action_mask"])
