"""Listings with sizes, and unfinished multipart uploads, against every object store."""

from __future__ import annotations

import time

import pytest

from infra.object_store import LocalObjectStore
from infra.object_store.listing import list_objects
from infra.object_store.multipart import Upload, abort_uploads, list_uploads
from rlhf_core.lease import Holder, Lease
from tasks.garbage.collect import collect, find_garbage
from tests.fixtures.stored_run import StoredRun

MIB = 2**20


def begin_upload(store, key, parts):
    """A multipart upload whose writer died after these parts."""
    upload_id = store._request(key, "create_multipart_upload", Key=store._name(key))["UploadId"]
    for number, size in enumerate(parts, 1):
        part = {"Key": store._name(key), "UploadId": upload_id, "PartNumber": number, "Body": b"x" * size}
        store._request(key, "upload_part", **part)
    return upload_id


def test_listing_with_sizes(store):
    before = time.time()
    for key, size in (("a/1.bin", 3), ("a/b/2.bin", 0), ("ab/3.bin", 7)):
        store.put(key, b"x" * size)
    found = list_objects(store, "a")
    assert [(entry.key, entry.bytes) for entry in found] == [("a/1.bin", 3), ("a/b/2.bin", 0)]
    assert [entry.key for entry in list_objects(store, "")] == store.list("")
    assert all(abs(entry.modified - before) < 60 for entry in found)  # the server's clock counts whole seconds
    assert list_objects(store, "nothing") == []


def test_unfinished_uploads_are_found_and_aborted(store):
    if isinstance(store, LocalObjectStore):
        assert list_uploads(store, "runs") == []
        abort_uploads(store, [Upload("runs/r/x", "1", 0.0, 0)])
        pytest.skip("a folder has no multipart uploads")
    before = time.time()
    first = begin_upload(store, "runs/r/checkpoints/0000000001/a/rank0.pt", [5 * MIB, 100])
    second = begin_upload(store, "runs/r/checkpoints/0000000001/a/rank1.pt", [])
    begin_upload(store, "runs/r2/checkpoints/0000000001/a/rank0.pt", [10])
    store.put("runs/r/whole.bin", b"x")

    found = list_uploads(store, "runs/r")
    assert [(u.key, u.upload_id, u.bytes) for u in found] == [
        ("runs/r/checkpoints/0000000001/a/rank0.pt", first, 5 * MIB + 100),
        ("runs/r/checkpoints/0000000001/a/rank1.pt", second, 0),
    ]
    assert all(abs(upload.started - before) < 60 for upload in found)
    assert store.list("runs/r") == ["runs/r/whole.bin"]

    abort_uploads(store, found)
    assert list_uploads(store, "runs/r") == []
    abort_uploads(store, found)  # gone already
    assert len(list_uploads(store, "runs/r2")) == 1
    assert store.get("runs/r/whole.bin") == b"x"


def test_garbage_of_a_run(store):
    """Every kind of garbage in a store, with a living driver and without."""
    run = StoredRun(store)
    run.finish(0)
    run.checkpoint(10)
    safe = [run.shard(0, "score", "loser").key, *run.checkpoint(5, "never", committed=False)]
    decided = "runs/r/checkpoints/0000000010/late/rank0.pt"
    if not isinstance(store, LocalObjectStore):
        begin_upload(store, decided, [10])
        begin_upload(store, "runs/r/checkpoints/0000000020/cut/rank0.pt", [10])
        safe.append(decided)
    undecided = [run.shard(1, "score", "dead").key]
    undecided += ["runs/r/checkpoints/0000000020/cut/rank0.pt"] * (len(list_uploads(store, "runs/r")) // 2)
    kept = set(store.list("runs")) - set(safe) - set(undecided)

    with Lease.acquire(store, "r", Holder.current()):
        garbage = find_garbage(store, "r", 0.0)
        assert sorted(item.name for item in garbage.items) == sorted(safe)
        collect(store, garbage)
    garbage = find_garbage(store, "r", 0.0)
    assert sorted(item.name for item in garbage.items) == sorted(undecided)
    collect(store, garbage)
    assert find_garbage(store, "r", 0.0).items == ()
    assert list_uploads(store, "runs/r") == []
    assert {key for key in store.list("runs") if "/lease/" not in key} == kept
