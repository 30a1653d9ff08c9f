"""The rollout buffer over every object store: write, commit, adopt, refuse, verify, merge."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pyarrow as pa
import pytest
import torch

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.arrays import flat, ragged
from rlhf_core.buffer import (
    StageWriter,
    commit_stage,
    decode,
    encode,
    find_stage,
    load_stage,
    read_rows,
    read_shard,
)
from rlhf_core.errors import ConflictingCommit, CorruptObject, NotCommitted
from rlhf_core.manifests import StageManifest
from rlhf_core.schema import ROLLOUTS, check_table, rewards_schema

RUN = "run-1"


def rollouts(rows, seed=0):
    dice = random.Random(seed)
    lengths = [dice.randrange(0, 9) for _ in range(rows)]
    tokens = sum(lengths)
    lists = {
        "prompt_ids": ragged(torch.arange(2 * rows, dtype=torch.int32), [2] * rows),
        "response_ids": ragged(torch.randint(0, 999, (tokens,), dtype=torch.int32), lengths),
        "logprobs": ragged(-torch.rand(tokens), lengths),
    }
    plain = {
        "sample_id": [f"s{row:05d}" for row in range(rows)],
        "prompt_id": [f"p{row // 4}" for row in range(rows)],
        "group": [row // 4 for row in range(rows)],
        "sample": [row % 4 for row in range(rows)],
        "policy_version": [3] * rows,
        "attempt": ["a1"] * rows,
        "engine": ["engine-0"] * rows,
        "finish_reason": ["stop"] * rows,
        "seconds": [0.5] * rows,
    }
    return check_table(pa.table({**plain, **lists}).select(ROLLOUTS.names).cast(ROLLOUTS), ROLLOUTS)


def rewards(ids):
    schema = rewards_schema(["exact"])
    rows = len(ids)
    columns = {
        "sample_id": ids,
        "reward": [float(row) for row in range(rows)],
        "status": ["ok"] * rows,
        "error": [None] * rows,
        "response_text": ["text"] * rows,
        "component/exact": [None] * rows,
    }
    return check_table(pa.table(columns, schema=schema), schema)


def manifest(stage, attempt, shards=(), **more):
    more = {"policy_version": 3, "run": RUN, "iteration": 7, **more}
    return StageManifest(stage=stage, attempt=attempt, shards=tuple(shards), **more)


def write(store, stage, attempt, table, cuts):
    writer = StageWriter(store, RUN, 7, stage, attempt)
    edges = [0, *cuts, table.num_rows]
    return [writer.write_shard(table.slice(a, b - a), a) for a, b in pairwise(edges)]


def commit(store, stage, table, cuts, attempt="a1", **more):
    committed, mine = commit_stage(store, manifest(stage, attempt, write(store, stage, attempt, table, cuts), **more))
    assert mine
    return committed


def test_write_commit_read(store):
    table = rollouts(600)
    shards = write(store, "generate", "a1", table, [250, 300])
    assert find_stage(store, RUN, 7, "generate") is None
    with pytest.raises(NotCommitted, match=r"commits/generate\.json"):
        load_stage(store, RUN, 7, "generate")
    committed, mine = commit_stage(store, manifest("generate", "a1", reversed(shards), tokens=9, metrics={"a": 0.1}))
    assert mine
    assert (committed.rows, committed.shards) == (600, tuple(shards))
    assert load_stage(store, RUN, 7, "generate") == find_stage(store, RUN, 7, "generate") == committed
    assert (
        committed.shards[1].key
        == f"runs/{RUN}/iterations/000007/data/generate/a1/00000250-{shards[1].blake3[:16]}.arrow"
    )
    read = read_rows(store, [committed])
    assert read.equals(table)
    assert check_table(read, ROLLOUTS) is read


def test_encoding_is_deterministic_and_exact():
    table = rollouts(300)
    data = encode(table)
    assert encode(table) == data
    assert decode(data).equals(table)
    assert decode(data).schema.equals(ROLLOUTS, check_metadata=True)
    assert encode(table.slice(10, 20)) == encode(pa.concat_tables([table.slice(10, 20)]).combine_chunks())
    for cut in range(0, len(data), 97):
        with pytest.raises(CorruptObject):
            decode(data[:cut])


def test_writing_again_is_the_same_object(store):
    table = rollouts(10)
    assert write(store, "generate", "a1", table, []) == write(store, "generate", "a1", table, [])
    assert len(store.list(layout.stage_data(RUN, 7, "generate"))) == 1


def test_retry_adopts_what_another_attempt_committed(store):
    first = commit(store, "generate", rollouts(8, seed=1), [4], attempt="a1")
    shards = write(store, "generate", "a2", rollouts(8, seed=2), [])
    adopted, mine = commit_stage(store, manifest("generate", "a2", shards))
    assert (adopted, mine) == (first, False)
    again, mine = commit_stage(store, manifest("generate", "a1", first.shards))
    assert (again, mine) == (first, True)  # the same commit once more is a success


@pytest.mark.parametrize("other", [{"policy_version": 4}, {"parents": {"generate": "x"}}])
def test_commit_from_other_inputs_is_refused(store, other):
    first = commit(store, "score", rewards(["a", "b"]), [])
    shards = write(store, "score", "a2", rewards(["a", "b"]), [])
    with pytest.raises(ConflictingCommit, match="attempt 'a1'"):
        commit_stage(store, manifest("score", "a2", shards, **other))
    assert load_stage(store, RUN, 7, "score") == first


def test_racing_attempts_agree_on_one_winner(store):
    tables = {f"a{number}": rollouts(6, seed=number) for number in range(6)}
    ours = {
        name: manifest("generate", name, write(store, "generate", name, table, [3])) for name, table in tables.items()
    }
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda name: commit_stage(store, ours[name]), ours))
    winners = [committed for committed, mine in results if mine]
    assert len(winners) == 1
    assert all(committed == winners[0] for committed, _ in results)
    assert read_rows(store, winners).equals(tables[winners[0].attempt])


def test_gaps_overlaps_and_wrong_counts_are_refused(store):
    table = rollouts(9)
    a, b, c = write(store, "generate", "a1", table, [3, 6])
    for shards, message in (
        ([b, c], "rows 0 to 2 are missing"),
        ([a, c], "rows 3 to 5 are missing"),
        ([a, b, b], "there twice"),
    ):
        with pytest.raises(ValueError, match=message):
            commit_stage(store, manifest("generate", "a1", shards))
    with pytest.raises(ValueError, match="says 8 rows, its shards hold 9"):
        commit_stage(store, manifest("generate", "a1", [a, b, c], rows=8))
    assert find_stage(store, RUN, 7, "generate") is None


def test_stage_without_shards(store):
    committed, mine = commit_stage(store, manifest("update", "a1", rows=32, details={"weights": "abc"}))
    assert mine
    assert load_stage(store, RUN, 7, "update") == committed
    assert committed.rows == 32
    with pytest.raises(ValueError, match="no shards"):
        read_rows(store, [committed])


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "missing", "swap"])
def test_damaged_shards_are_never_read(store, damage):
    committed = commit(store, "generate", rollouts(50), [25])
    good, shard = committed.shards
    data = bytearray(store.get(shard.key))
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-10:]
    elif damage == "extend":
        data += b"x"
    elif damage == "swap":
        data = bytearray(store.get(good.key))
    if damage == "missing":
        store.delete([shard.key])
    else:
        store.put(shard.key, bytes(data))
    with pytest.raises(CorruptObject, match="00000025"):
        read_shard(store, shard)
    with pytest.raises(CorruptObject, match="00000025"):
        read_rows(store, [committed])
    assert read_rows(store, [committed], rows=range(25)).num_rows == 25  # the good shard alone stays readable


def test_damage_on_the_way_is_read_again(tmp_path):
    class Flaky(LocalObjectStore):
        reads = 0

        def get(self, key):
            data = super().get(key)
            Flaky.reads += 1
            return data[:-1] if Flaky.reads < 3 else data

    store = Flaky(tmp_path)
    shard = write(store, "generate", "a1", rollouts(5), [])[0]
    assert read_shard(store, shard).num_rows == 5
    assert Flaky.reads == 3


def test_column_groups_with_different_cuts_are_merged(store):
    table = rollouts(100)
    ids = table["sample_id"].to_pylist()
    generated = commit(store, "generate", table, [10, 20, 70])
    scored = commit(store, "score", rewards(ids), [33, 66], parents={"generate": generated.digest})
    stages = [generated, scored]
    merged = read_rows(store, stages)
    assert merged.column_names == [*table.column_names, "reward", "status", "error", "response_text", "component/exact"]
    assert merged["reward"].to_pylist() == [float(row) for row in range(100)]
    for rows in (
        range(0, 1),
        range(9, 11),
        range(20, 70),
        range(69, 100),
        range(99, 100),
        range(33, 33),
        range(100, 100),
    ):
        part = read_rows(store, stages, columns=["reward", "response_ids"], rows=rows)
        assert part.column_names == ["reward", "response_ids"]
        assert part.equals(merged.select(["reward", "response_ids"]).slice(rows.start, len(rows)))
    assert read_rows(store, [scored], columns=["status"]).num_rows == 100


def test_only_overlapping_shards_are_fetched(store):
    committed = commit(store, "generate", rollouts(100), [10, 20, 70])
    store.delete([committed.shards[0].key, committed.shards[3].key])
    assert read_rows(store, [committed], rows=range(10, 70)).num_rows == 60
    with pytest.raises(CorruptObject, match="missing"):
        read_rows(store, [committed], rows=range(9, 70))


def test_bad_reads_are_refused(store):
    table = rollouts(6)
    ids = table["sample_id"].to_pylist()
    generated = commit(store, "generate", table, [])
    parents = {"generate": generated.digest}
    reordered = commit(store, "score", rewards(ids[::-1]), [], parents=parents)
    with pytest.raises(CorruptObject, match="other sample ids"):
        read_rows(store, [generated, reordered])
    fewer = commit(store, "score-v2", rewards(ids[:5]), [], parents=parents)
    with pytest.raises(CorruptObject, match="has 5 rows"):
        read_rows(store, [generated, fewer])
    stranger = commit(store, "score-v3", rewards(ids), [], parents={"generate": "0" * 64})
    with pytest.raises(ConflictingCommit, match="computed from"):
        read_rows(store, [generated, stranger])
    twice = commit(store, "score-v4", table, [], parents=parents)
    with pytest.raises(ValueError, match="'prompt_id' is in stage 'score-v4'"):
        read_rows(store, [generated, twice])
    with pytest.raises(ValueError, match="nothing"):
        read_rows(store, [generated], columns=["nothing"])
    for rows in (range(0, 7), range(-1, 3), range(0, 6, 2), range(4, 2)):
        with pytest.raises(ValueError, match="rows"):
            read_rows(store, [generated], rows=rows)
    with pytest.raises(ValueError, match="no manifest"):
        read_rows(store, [])


def test_manifest_under_another_key_is_refused(store):
    commit(store, "generate", rollouts(3), [])
    store.put(layout.stage_commit(RUN, 8, "generate"), store.get(layout.stage_commit(RUN, 7, "generate")))
    with pytest.raises(CorruptObject, match="iteration 7"):
        load_stage(store, RUN, 8, "generate")


def test_from_the_store_into_tensors(store):
    table = rollouts(300)
    committed = commit(store, "generate", table, [128])
    values, offsets = flat(read_rows(store, [committed])["logprobs"])
    rows = values.tensor_split(offsets[1:-1])
    assert [row.tolist() for row in rows] == table["logprobs"].to_pylist()


def test_shard_needs_sample_ids(store):
    with pytest.raises(ValueError, match="sample_id"):
        StageWriter(store, RUN, 0, "score", "a").write_shard(pa.table({"x": [1]}), 0)
