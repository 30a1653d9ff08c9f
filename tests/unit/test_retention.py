"""Which checkpoints and rollouts a run gives up, and which never."""

from __future__ import annotations

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.buffer import load_stage, read_rows
from rlhf_core.config import parse_config
from rlhf_core.errors import NotCommitted
from rlhf_core.lineage import load_lineage
from rlhf_core.manifests import CheckpointRecord, IterationRecord, RetiredRecord
from rlhf_core.records import commit_record, find_record, load_record
from tasks.progress import committed_versions
from tasks.retention import Retired, require_experience, retire
from tests.fixtures.stored_run import StoredRun


class CountingStore(LocalObjectStore):
    """Counts look-ups."""

    def __init__(self, root):
        super().__init__(root)
        self.calls = 0

    def exists(self, key):
        self.calls += 1
        return super().exists(key)

    def list(self, prefix):
        self.calls += 1
        return super().list(prefix)

    def get(self, key):
        self.calls += 1
        return super().get(key)


@pytest.fixture
def store(tmp_path):
    return CountingStore(tmp_path)


@pytest.fixture
def run(store):
    return StoredRun(store)


def config(keep=2, every=0, hours=None):
    return parse_config(
        {"run": "r", "checkpoint": {"keep": keep, "keep_every": every}, "storage": {"keep_rollouts_hours": hours}}
    )


def retire_run(store, run="r", **settings):
    return retire(store, load_lineage(store, run), config(**settings))


def there(store, keys):
    return [store.exists(key) for key in keys]


def test_the_newest_checkpoints_stay(store, run):
    files = {version: run.checkpoint(version) for version in (10, 20, 30, 40)}
    assert retire_run(store, keep=2) == Retired(checkpoints=(10, 20), objects=4)
    assert committed_versions(store, "r") == [30, 40]
    assert store.list(layout.checkpoint_root("r", 10)) == []
    for version in (30, 40):
        record = load_record(store, layout.checkpoint_commit("r", version), CheckpointRecord)
        assert [f.key for f in record.files] == files[version]
        assert all(there(store, files[version]))
    assert retire_run(store, keep=2) == Retired()


def test_every_mth_checkpoint_stays_too(store, run):
    for version in range(10, 80, 10):
        run.checkpoint(version)
    assert retire_run(store, keep=1, every=30).checkpoints == (10, 20, 40, 50)
    assert committed_versions(store, "r") == [30, 60, 70]


@pytest.mark.parametrize(
    ("iteration", "stage", "kept"),
    [(25, "score", 20), (20, "generate", 20), (19, "update", 10), (19, "sync", 20), (5, "generate", None)],
)
def test_a_fork_keeps_the_checkpoint_that_it_begins_from(store, run, iteration, stage, kept):
    for version in (10, 20, 30, 40):
        run.checkpoint(version)
    StoredRun(store, "fork", parent=("r", iteration, stage))
    retire_run(store, keep=1)
    assert committed_versions(store, "r") == [*([kept] if kept else []), 40]


def test_a_fork_of_a_fork_keeps_what_it_shares_with_the_first_run(store, run):
    for version in (10, 20, 30, 40):
        run.checkpoint(version)
    StoredRun(store, "fork", parent=("r", 35, "generate"))
    StoredRun(store, "again", parent=("fork", 12, "score"))
    retire_run(store, keep=1)
    assert committed_versions(store, "r") == [10, 30, 40]


def test_rollouts_stay_for_ever_unless_told(store, run):
    keys = [key for k in range(4) for key in run.finish(k, hours_ago=9999)]
    run.checkpoint(3)
    assert retire_run(store) == Retired()
    assert all(there(store, keys))


def test_rollouts_retire_only_behind_the_checkpoints_that_stay(store, run):
    keys = {k: run.finish(k, hours_ago=10) for k in range(6)}
    assert retire_run(store, hours=1) == Retired()  # no checkpoint at all
    run.checkpoint(2)
    run.checkpoint(4)
    run.shard(1, "score", "loser")
    done = retire_run(store, keep=2, hours=1)
    assert done == Retired(iterations=(0, 1), objects=7)  # versions 1 and 2: a replay from version 2 needs 2 and later
    assert not any(there(store, keys[0] + keys[1]))
    assert all(there(store, keys[2] + keys[3] + keys[4] + keys[5]))
    manifest = load_stage(store, "r", 0, "generate")
    assert manifest.shards[0].key == keys[0][0]
    assert find_record(store, layout.iteration_done("r", 0), IterationRecord) is not None
    record = load_record(store, layout.iteration_retired("r", 0), RetiredRecord)
    assert "keep_rollouts_hours = 1" in record.reason
    assert read_rows(store, [load_stage(store, "r", 2, "score")]).num_rows == 4
    run.checkpoint(6)
    assert retire_run(store, keep=2, hours=1) == Retired(checkpoints=(2,), iterations=(2, 3), objects=8)
    assert retire_run(store, keep=1, hours=1) == Retired(checkpoints=(4,), iterations=(4, 5), objects=8)


def test_young_rollouts_stay(store, run):
    old = run.finish(0, hours_ago=3)
    young = run.finish(1, hours_ago=1)
    run.finish(2, hours_ago=3)  # in order: it waits for the one before it
    run.checkpoint(3)
    assert retire_run(store, hours=2).iterations == (0,)
    assert not any(there(store, old))
    assert all(there(store, young))
    assert retire_run(store, hours=0.5).iterations == (1, 2)


def test_nothing_that_a_fork_shares_retires(store, run):
    keys = {k: run.finish(k, hours_ago=10) for k in range(6)}
    run.checkpoint(6)
    StoredRun(store, "fork", parent=("r", 2, "score"))
    assert retire_run(store, hours=1).iterations == (3, 4, 5)
    assert all(there(store, keys[0] + keys[1] + keys[2]))
    # Also when it comes after some have retired already.
    StoredRun(store, "late", parent=("r", 4, "generate"))
    assert retire_run(store, hours=1) == Retired()
    require_experience(store, load_lineage(store, "fork"), range(3))
    with pytest.raises(NotCommitted, match="iteration 3 of 'r' were deleted at"):
        require_experience(store, load_lineage(store, "late"), range(2, 4))


def test_a_fork_deletes_nothing_of_its_parent(store, run):
    keys = [key for k in range(4) for key in run.finish(k, hours_ago=10)]
    run.checkpoint(1)
    run.checkpoint(2)
    fork = StoredRun(store, "fork", parent=("r", 3, "score"))
    own = [key for k in (3, 4, 5) for key in fork.finish(k, hours_ago=10)]
    fork.checkpoint(5)
    assert retire_run(store, "fork", keep=1, hours=1).iterations == (3, 4)
    assert all(there(store, keys))
    assert committed_versions(store, "r") == [1, 2]
    assert there(store, own) == [False] * 6 + [True] * 3


def test_a_fork_that_comes_in_the_middle_is_seen(store, run):
    """It writes that it shares the iteration, and then looks for RETIRED.json; retire does it the other way round."""
    keys = run.finish(0, hours_ago=10)
    run.checkpoint(1)

    class ForkedMeanwhile(CountingStore):
        def create(self, key, data):
            if key.endswith("RETIRED.json"):
                StoredRun(store, "fork", parent=("r", 0, "score"))
            return super().create(key, data)

    assert retire_run(ForkedMeanwhile(store.root), hours=1) == Retired()
    assert all(there(store, keys))
    with pytest.raises(NotCommitted, match="deleted"):
        require_experience(store, load_lineage(store, "fork"), [0])


def test_a_kill_in_the_middle_is_made_good_by_the_next_call(store, run):
    keys = {k: run.finish(k, hours_ago=10) for k in range(2)}
    run.checkpoint(2)
    record = RetiredRecord(run="r", iteration=0, retired="2026-01-01T00:00:00+00:00", reason="test")
    commit_record(store, layout.iteration_retired("r", 0), record)
    store.delete(keys[0][:1])
    assert retire_run(store, hours=1) == Retired(iterations=(1,), objects=5)
    assert not any(there(store, keys[0] + keys[1]))


def test_the_cost_does_not_grow_with_the_run(store, run):
    record = RetiredRecord(run="r", iteration=0, retired="2026-01-01T00:00:00+00:00", reason="test")
    calls = {}
    for length in (10, 300):
        for k in range(length):
            if not store.exists(layout.iteration_retired("r", k)):
                commit_record(store, layout.iteration_retired("r", k), record)
        run.finish(length, hours_ago=10)
        run.checkpoint(length + 1)
        before = store.calls
        assert retire_run(store, keep=1, hours=1).iterations == (length,)
        calls[length] = store.calls - before
    assert calls[300] - calls[10] < 20
