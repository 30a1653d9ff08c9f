"""What counts as garbage of a run, what never does, and that `rlhf gc` deletes exactly that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from urllib.parse import quote

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.buffer import load_stage, read_rows
from rlhf_core.errors import CorruptObject, NotCommitted, RunLocked, UserError
from rlhf_core.lease import Claim, Heartbeat, Holder, Lease, lease_state
from rlhf_core.lineage import head_of, load_lineage, start_branch, start_revision
from rlhf_core.manifests import CheckpointRecord, ParentRef, RetiredRecord
from rlhf_core.records import canonical, commit_record, load_record, seal
from tasks.garbage.collect import collect, find_garbage
from tasks.names import namespace_of
from tests.fixtures.stored_run import StoredRun, record_of

HOUR = 3600.0


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def run(store):
    return StoredRun(store)


def age(path, hours):
    then = time.time() - hours * HOUR
    os.utime(path, (then, then))


def names(garbage):
    return sorted(item.name for item in garbage.items)


def find(store, grace=0.0, **options):
    return find_garbage(store, "r", grace, **options)


def clean(store, grace=0.0, **options):
    """Collect, and return what was deleted. Afterwards nothing is left, and nothing but that is gone."""
    before = set(store.list(""))
    garbage = find(store, grace, **options)
    collect(store, garbage)
    gone = before - set(store.list(""))
    assert sorted(gone) == names(garbage)
    assert find(store, grace, **options).items == ()
    return sorted(gone)


def claim(store, ttl=60.0, seen=0.0):
    """A driver on another machine, whose last sign of life was ``seen`` seconds ago."""
    holder = Holder(host="elsewhere", pid=1, process_start=0.0, user="ann")
    at = time.time() - seen
    record = Claim(run="r", epoch=1, holder=holder, token="t", acquired_at=at, ttl_seconds=ttl)
    commit_record(store, layout.lease("r", 1), record)
    beat = seal(Heartbeat(epoch=1, token="t", counter=1, at=at))
    store.put(layout.heartbeat("r", 1), canonical(beat.model_dump(mode="json")))


def test_a_whole_run_has_no_garbage(store, run):
    for k in range(3):
        run.finish(k)
    run.checkpoint(1)
    run.checkpoint(3)
    for key in (
        "summary.json",
        "export/v0000000003/config.json",
        "prompts/train.arrow",
        "reported/prefect.json",
        "iterations/000001/other.bin",
    ):
        store.put(f"runs/r/{key}", b"x")
    garbage = find(store)
    assert (garbage.items, garbage.spared, garbage.driver) == ((), {}, None)
    collect(store, garbage)
    assert lease_state(store, "r") is None  # nothing to do takes no lease


def test_the_loser_of_a_committed_stage_goes_at_once(store, run):
    run.finish(0)
    lost = [run.shard(0, "score", "loser").key, run.shard(0, "generate", "loser").key]
    size = sum(len(store.get(key)) for key in lost)
    garbage = find(store, grace=24 * HOUR)
    assert names(garbage) == sorted(lost)
    assert sum(item.bytes for item in garbage.items) == size
    assert {(i.kind, i.reason, i.exclusive) for i in garbage.items} == {
        ("shard", "another attempt at the stage is committed", False)
    }
    assert clean(store, grace=24 * HOUR) == sorted(lost)
    rows = read_rows(store, [load_stage(store, "r", 0, "score")])
    assert rows["score"].to_pylist() == ["a"] * 4


def test_a_manifest_may_name_shards_of_several_attempts(store, run):
    shards = [run.shard(0, "generate", "first"), run.shard(0, "generate", "second", first_row=4)]
    lost = run.shard(0, "generate", "first", first_row=4)
    run.commit(0, "generate", attempt="second", shards=shards)
    assert clean(store) == [lost.key]
    assert read_rows(store, [load_stage(store, "r", 0, "generate")]).num_rows == 8


def test_segments_of_the_open_generate_stage_survive(store, run):
    run.finish(0)
    segments = [run.shard(1, "generate", attempt).key for attempt in ("x", "y")]
    garbage = find(store)
    assert garbage.items == ()
    assert list(garbage.spared.values()) == [2]
    assert "the next attempt takes over" in next(iter(garbage.spared))
    collect(store, garbage)
    assert all(store.exists(key) for key in segments)


def test_other_stages_that_nobody_committed_go_when_nobody_drives(store, run):
    run.finish(0)
    run.commit(1, "generate")
    open_shard = run.shard(1, "score", "dead").key
    assert find(store, grace=HOUR).items == ()
    assert find(store, grace=HOUR).spared == {"an attempt at a stage that nobody committed, but less than 1 h ago": 1}
    age(store.root / open_shard, hours=2)
    assert names(find(store, grace=HOUR)) == [open_shard]
    with Lease.acquire(store, "r", Holder.current()):
        garbage = find(store, grace=HOUR)
        assert garbage.items == ()
        assert "is driven by" in garbage.driver
        assert list(garbage.spared) == ["an attempt at a stage that nobody committed, but a driver lives"]
    assert clean(store, grace=HOUR) == [open_shard]
    assert lease_state(store, "r").released


def test_a_living_driver_is_not_disturbed(store, run):
    run.finish(0)
    lost = run.shard(0, "score", "loser").key
    open_shard = run.shard(1, "score", "now").key
    before = find(store)
    assert names(before) == sorted([lost, open_shard])
    claim(store)
    with pytest.raises(RunLocked, match="driven by ann@elsewhere"):
        collect(store, before)
    assert store.exists(open_shard)
    assert not store.exists(lost)  # safe whoever drives


def test_a_driver_that_came_and_went_since_is_noticed(store, run):
    open_shard = run.shard(1, "score", "dead").key
    garbage = find(store)
    Lease.acquire(store, "r", Holder.current()).release()
    with pytest.raises(RunLocked, match="look again"):
        collect(store, garbage)
    assert store.exists(open_shard)
    assert lease_state(store, "r").released
    assert clean(store) == [open_shard]


def test_checkpoints_without_a_record(store, run):
    run.checkpoint(10)
    older = run.checkpoint(5, "never", committed=False)
    loser = run.checkpoint(10, "loser", committed=False)
    newer = run.checkpoint(20, "cut", committed=False)
    with Lease.acquire(store, "r", Holder.current()):
        assert names(find(store)) == sorted(older + loser)
        assert names(find(store, grace=HOUR)) == sorted(loser)
    assert clean(store) == sorted(older + loser)
    # Trainers may live that still bring it up; the next driver would publish it.
    assert any("trainers may live" in reason for reason in find(store).spared)
    assert all(store.exists(key) for key in newer)
    record = load_record(store, layout.checkpoint_commit("r", 10), CheckpointRecord)
    assert all(store.exists(file.key) for file in record.files)


def test_what_a_retirement_left_behind(store, run):
    keys = run.finish(0)
    run.finish(1)
    record = RetiredRecord(run="r", iteration=0, retired="2026-01-01T00:00:00+00:00", reason="test")
    commit_record(store, layout.iteration_retired("r", 0), record)
    assert names(find(store)) == sorted(keys)
    StoredRun(store, "fork", parent=("r", 0, "score"))
    assert find(store).items == ()  # it came in the middle: see retire


def test_what_a_fork_names_survives(store, run):
    run.finish(0)
    extra = run.shard(0, "score", "shared")
    StoredRun(store, "fork", parent=("r", 0, "score")).commit(0, "score", shards=[extra])
    assert find(store).items == ()


def test_a_rerun_that_was_cut_off_before_it_began(store, run):
    run.finish(0)
    parent = ParentRef(run="r", iteration=0, stage="score")
    start_branch(store, record_of("r~1", parent))
    made = sorted([layout.child("r", "r~1"), layout.run_record("r~1")])
    with Lease.acquire(store, "r", Holder.current()):
        assert find(store).items == ()  # it may be under way
    assert find(store, grace=HOUR).items == ()
    garbage = find(store)
    assert names(garbage) == made
    assert garbage.items[0].name == layout.run_record("r~1")
    assert clean(store) == made
    # A whole one is no garbage, and neither is its parent's record of it.
    start_revision(store, load_lineage(store, "r"), ParentRef(run="r", iteration=0, stage="score"), "test", "")
    assert head_of(store, "r") == "r~1"
    assert find(store).items == ()


def test_a_damaged_branch_that_holds_work_is_left_alone(store, run):
    run.finish(0)
    start_revision(store, load_lineage(store, "r"), ParentRef(run="r", iteration=0, stage="score"), "test", "")
    store.put("runs/r~1/iterations/000000/commits/score.json", b"{}")
    store.delete([layout.revision("r", 1)])
    assert find(store).items == ()


def test_open_stages_of_a_branch_that_was_replaced(store, run):
    run.finish(0)
    left = run.shard(1, "generate", "old").key
    start_revision(store, load_lineage(store, "r"), ParentRef(run="r", iteration=0, stage="score"), "test", "")
    assert clean(store) == [left]


def test_local_files(store, run, tmp_path):
    run.commit(0, "generate")
    home = tmp_path / "home"
    staging = home / "staging" / namespace_of(store.url)
    folder = staging / "r" / "r-engine-0"
    folder.mkdir(parents=True)
    waiting = layout.shard("r", 1, "generate", "x", 0, "0" * 64)
    late = layout.shard("r", 0, "generate", "x", 0, "0" * 64)
    for name in (
        f"{quote(waiting, safe='')}.segment",
        f"{quote(late, safe='')}.segment",
        "half.partial",
        "odd.segment",
    ):
        (folder / name).write_bytes(b"12345")
    saved = staging / "r" / "r-trainer-0" / "checkpoints" / "a"
    saved.mkdir(parents=True)
    (saved / "rank0.pt").write_bytes(b"x")
    elsewhere = home / "staging" / namespace_of(str(tmp_path / "another")) / "r" / "r-engine-0"
    others = (staging / "r2", elsewhere)  # another run, and one of the same name in another store
    for other in others:
        other.mkdir(parents=True)
        (other / "half.partial").write_bytes(b"x")

    assert find(store).items == ()
    with Lease.acquire(store, "r", Holder.current()):
        assert find(store, home=home).items == ()
    assert find(store, grace=HOUR, home=home).items == ()
    garbage = find(store, home=home)
    assert [(i.kind, i.bytes) for i in garbage.items if i.name.endswith("half.partial")] == [("local file", 5)]
    assert garbage.spared == {"a finished segment that waits for the store: `rlhf resume` uploads it": 2}
    collect(store, garbage)
    kept = {path for path in (home / "staging").rglob("*") if path.is_file()}
    mine = {folder / "odd.segment", folder / f"{quote(waiting, safe='')}.segment"}
    assert kept == mine | {other / "half.partial" for other in others}
    assert not saved.parent.exists()


def test_damage_ends_the_search(store, run):
    run.finish(0)
    run.shard(0, "score", "loser")
    key = layout.stage_commit("r", 0, "score")
    store.put(key, store.get(key).replace(b'"attempt":"a"', b'"attempt":"b"'))
    with pytest.raises(CorruptObject, match=r"score\.json.*was changed"):
        find(store)


def test_wrong_names(store, run):
    with pytest.raises(NotCommitted, match="no run 'nobody'"):
        find_garbage(store, "nobody", 0.0)
    with pytest.raises(UserError, match="run id"):
        find_garbage(store, "r~1", 0.0)


def rlhf_gc(*arguments, cwd):
    foreign = ("RAY_", "PREFECT_", "RLHF_", "AWS_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    command = [sys.executable, "-m", "flows.cli.main", "gc", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_command(store, run, tmp_path):
    run.finish(0)
    lost = run.shard(0, "score", "loser").key
    dead = run.shard(1, "advantages", "dead").key
    before = store.list("")
    done = rlhf_gc("r", "--dry-run", "--store", store.url, "--grace-hours", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "would be deleted from run r" in done.stdout
    assert "another attempt at the stage is committed" in done.stdout
    assert "no Ray cluster" in done.stderr
    assert store.list("") == before
    done = rlhf_gc("r", "--store", store.url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\ndeleted from run r" in f"\n{done.stdout}"
    assert "left alone: 1 x an attempt at a stage that nobody committed, but less than 1 h ago" in done.stdout
    assert sorted(set(before) - set(store.list(""))) == [lost]
    assert store.exists(dead)


def test_the_command_names_what_is_wrong(tmp_path):
    done = rlhf_gc("nobody", "--store", str(tmp_path / "empty"), cwd=tmp_path)
    assert done.returncode == 3
    assert "there is no run 'nobody'" in done.stderr
    assert "Traceback" not in done.stderr
    assert rlhf_gc("r", "--store", "ftp://x", cwd=tmp_path).returncode == 2
    assert rlhf_gc("r", "--grace-hours", "-1", cwd=tmp_path).returncode == 2
