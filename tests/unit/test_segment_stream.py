"""The stream that makes finished groups durable: its order, its bounds, and what it leaves behind when the store fails."""

from __future__ import annotations

import queue
import threading
from urllib.parse import unquote

import pyarrow as pa
import pytest

from infra.object_store import LocalObjectStore
from rlhf_core.actors.stream import SegmentStream, upload_leftovers
from rlhf_core.buffer import StageWriter, read_shard
from rlhf_core.errors import NumericsError

PATIENCE = 60  # seconds, only ever spent by a test that fails
NEVER = 3600.0


class Watched(LocalObjectStore):
    """Tells what has become durable."""

    def __init__(self, root):
        super().__init__(root)
        self.durable = queue.SimpleQueue()

    def put(self, key, data):
        super().put(key, data)
        self.durable.put(key)


class Gated(Watched):
    """Takes nothing before the gate is opened; then it fails if it is told to."""

    def __init__(self, root, error=None):
        super().__init__(root)
        self.entered, self.gate, self.error = threading.Event(), threading.Event(), error

    def put(self, key, data):
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        super().put(key, data)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "staging" / "engine-0"


def stream_to(store, folder, budget=1000, flush_seconds=0.05, prepare=None):
    """A stream of groups that are numbers; a group takes ten bytes."""
    writer = StageWriter(store, "r", 0, "generate", "a1")

    def segment(groups):
        return writer.prepare(pa.table({"sample_id": [f"s{group}" for group in groups]}), groups[0], groups)

    return SegmentStream(
        store,
        prepare or segment,
        folder=folder,
        budget=budget,
        flush_seconds=flush_seconds,
        size=lambda _: 10,
    )


def blocked(stream, groups):
    """A thread that adds, and what came of it."""
    outcome = queue.SimpleQueue()

    def add():
        try:
            outcome.put(stream.add(groups))
        except (OSError, NumericsError) as error:
            outcome.put(error)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    return thread, outcome


def groups_of(shards):
    return [list(shard.groups) for shard in shards]


def test_groups_become_durable_while_the_stream_is_open(tmp_path, folder):
    store = Watched(tmp_path / "store")
    stream = stream_to(store, folder)
    stream.add([7])
    first = store.durable.get(timeout=PATIENCE)
    stream.add([3])
    second = store.durable.get(timeout=PATIENCE)
    assert store.list("") == sorted([first, second])
    shards = stream.finish()
    assert [shard.key for shard in shards] == [first, second]
    assert groups_of(shards) == [[7], [3]]
    assert [read_shard(store, shard)["sample_id"].to_pylist() for shard in shards] == [["s7"], ["s3"]]
    assert list(folder.iterdir()) == []


def test_a_disk_that_takes_nothing_is_passed_by(tmp_path, folder, caplog):
    store = Watched(tmp_path / "store")
    stream = stream_to(store, folder)
    folder.rmdir()
    folder.write_text("no folder any more")
    stream.add([7])
    assert store.durable.get(timeout=PATIENCE)
    stream.add([3])
    shards = stream.finish()
    assert groups_of(shards) == [[7], [3]]
    assert [read_shard(store, shard)["sample_id"].to_pylist() for shard in shards] == [["s7"], ["s3"]]
    assert "goes straight to the store" in caplog.text


def test_what_waits_in_memory_is_bounded_too(tmp_path, folder):
    store = Gated(tmp_path / "store")
    stream = stream_to(store, folder, budget=20)
    folder.rmdir()
    folder.write_text("no folder any more")
    stream.add([1])
    assert store.entered.wait(PATIENCE)
    stream.add([2])
    thread, outcome = blocked(stream, [3])
    assert outcome.empty()
    store.gate.set()
    thread.join(PATIENCE)
    assert outcome.get(timeout=PATIENCE) is None
    assert groups_of(stream.finish()) == [[1], [2], [3]]


def test_what_finishes_soon_after_shares_a_segment(tmp_path, folder):
    stream = stream_to(LocalObjectStore(tmp_path / "store"), folder, flush_seconds=NEVER)
    for group in range(20):
        stream.add([group])
    assert groups_of(stream.finish()) == [list(range(20))]


def test_nothing_to_do(tmp_path, folder):
    store = LocalObjectStore(tmp_path / "store")
    assert stream_to(store, folder).finish() == ()
    assert store.list("") == []


def test_one_add_is_never_split(tmp_path, folder):
    store = LocalObjectStore(tmp_path / "store")
    stream = stream_to(store, folder, budget=60, flush_seconds=0.001)
    blocks = [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(100)]
    for block in blocks:
        stream.add(block)
    shards = stream.finish()
    assert len(shards) > 1
    whole = [groups[n : n + 3] for groups in groups_of(shards) for n in range(0, len(groups), 3)]
    assert whole == blocks
    assert sorted(shard.key for shard in shards) == store.list("")


def test_a_store_that_takes_nothing_holds_generation_up(tmp_path, folder):
    store = Gated(tmp_path / "store")
    stream = stream_to(store, folder, budget=50, flush_seconds=0.001)
    stream.add([0, 1])
    assert store.entered.wait(PATIENCE)
    stream.add([2, 3, 4])  # to the budget, and not beyond
    thread, outcome = blocked(stream, [5])
    thread.join(0.3)
    assert thread.is_alive()
    store.gate.set()
    assert outcome.get(timeout=PATIENCE) is None
    assert sorted(group for groups in groups_of(stream.finish()) for group in groups) == [0, 1, 2, 3, 4, 5]


def test_a_full_budget_does_not_wait_for_the_clock(tmp_path, folder):
    store = Watched(tmp_path / "store")
    stream = stream_to(store, folder, budget=20, flush_seconds=NEVER)
    stream.add([0, 1])
    assert store.durable.get(timeout=PATIENCE)
    stream.add([2, 3])
    assert store.durable.get(timeout=PATIENCE)
    assert groups_of(stream.finish()) == [[0, 1], [2, 3]]


def test_what_is_larger_than_the_budget_goes_through_alone(tmp_path, folder):
    store = Gated(tmp_path / "store")
    stream = stream_to(store, folder, budget=15, flush_seconds=0.001)
    stream.add([0, 1, 2])
    assert store.entered.wait(PATIENCE)
    thread, outcome = blocked(stream, [3, 4])
    thread.join(0.3)
    assert thread.is_alive()
    store.gate.set()
    assert outcome.get(timeout=PATIENCE) is None
    assert groups_of(stream.finish()) == [[0, 1, 2], [3, 4]]


def test_a_store_that_fails_fails_the_stream_and_the_staged_segment_stays(tmp_path, folder):
    store = Gated(tmp_path / "store", error=OSError("no space in the store"))
    stream = stream_to(store, folder, budget=20, flush_seconds=0.001)
    stream.add([0, 1])
    assert store.entered.wait(PATIENCE)
    thread, outcome = blocked(stream, [2])  # it waits for the budget, and must not wait for ever
    store.gate.set()
    assert outcome.get(timeout=PATIENCE) is store.error
    thread.join(PATIENCE)
    with pytest.raises(OSError, match="no space"):
        stream.finish()
    with pytest.raises(OSError, match="no space"):
        stream.add([3])
    (staged,) = folder.iterdir()
    key = unquote(staged.name.removesuffix(".segment"))
    assert staged.name.endswith(".segment")
    content = staged.read_bytes()

    (folder / "half.partial").write_bytes(b"half")
    after = Watched(tmp_path / "store")
    assert upload_leftovers(after, folder) == 1
    assert after.list("") == [key]
    assert after.get(key) == content
    assert list(folder.iterdir()) == []
    assert upload_leftovers(after, folder) == 0
    # Written again by a stream of the same attempt, it is the same object.
    stream = stream_to(after, folder, flush_seconds=NEVER)
    stream.add([0, 1])
    assert [shard.key for shard in stream.finish()] == [key]


def test_leftovers_stay_while_the_store_fails(tmp_path, folder):
    folder.mkdir(parents=True)
    (folder / "runs%2Fr%2Fx.arrow.segment").write_bytes(b"x")
    store = Gated(tmp_path / "store", error=OSError("down"))
    store.gate.set()
    with pytest.raises(OSError, match="down"):
        upload_leftovers(store, folder)
    assert [path.name for path in folder.iterdir()] == ["runs%2Fr%2Fx.arrow.segment"]


def test_no_leftovers_where_there_is_no_folder(tmp_path):
    store = LocalObjectStore(tmp_path / "store")
    assert upload_leftovers(store, tmp_path / "nowhere") == 0
    (tmp_path / "empty").mkdir()
    assert upload_leftovers(store, tmp_path / "empty") == 0


def test_groups_that_make_no_segment_fail_the_stream(tmp_path, folder):
    store = LocalObjectStore(tmp_path / "store")

    def prepare(groups):
        raise NumericsError(f"groups {groups}")

    stream = stream_to(store, folder, budget=10, flush_seconds=0.001, prepare=prepare)
    stream.add([1])
    _, outcome = blocked(stream, [2])
    assert isinstance(outcome.get(timeout=PATIENCE), NumericsError)
    with pytest.raises(NumericsError, match=r"groups \[1\]"):
        stream.finish()
    assert store.list("") == []
    assert list(folder.iterdir()) == []


def test_what_is_durable_before_a_failure_is_still_there(tmp_path, folder):
    store = Watched(tmp_path / "store")
    stream = stream_to(store, folder, flush_seconds=0.001)
    stream.add([0])
    key = store.durable.get(timeout=PATIENCE)
    store.put = Gated(tmp_path / "other").put  # from now on nothing comes through
    store.put.__self__.error = OSError("gone")
    store.put.__self__.gate.set()
    stream.add([1])
    with pytest.raises(OSError, match="gone"):
        stream.finish()
    assert store.list("") == [key]
    assert len(list(folder.glob("*.segment"))) == 1
