"""What rlhf_core asks of an object store, held against every implementation."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from infra.object_store import LocalObjectStore, S3ObjectStore, open_store
from rlhf_core.ports import ObjectStore
from tests.fixtures.processes import ending

ROOT = Path(__file__).parents[2]
MIB = 2**20


def test_is_an_object_store(store):
    assert isinstance(store, ObjectStore)
    assert open_store(store.url) == store


def test_put_get_replace(store):
    store.put("a/b.bin", b"one")
    assert store.get("a/b.bin") == b"one"
    store.put("a/b.bin", b"two, longer")
    assert store.get("a/b.bin") == b"two, longer"
    store.put("a/empty", b"")
    assert store.get("a/empty") == b""


def test_missing_key(store, tmp_path):
    store.put("folder/object", b"x")
    for key in ("nothing", "folder", "folder/none", "folder/object/below"):
        assert not store.exists(key)
        with pytest.raises(FileNotFoundError, match="no object"):
            store.get(key)
        with pytest.raises(FileNotFoundError, match="no object"):
            store.get_file(key, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert store.exists("folder/object")


def test_create_only_once(store):
    assert store.create("c/first.json", b"1")
    assert not store.create("c/first.json", b"2")
    assert store.get("c/first.json") == b"1"
    store.delete(["c/first.json"])
    assert store.create("c/first.json", b"3")


def test_list_is_sorted_and_by_folder(store):
    keys = ["l/b/2", "l/b/1", "l/a", "lx/other", "l/b.c"]
    for key in keys:
        store.put(key, b"x")
    assert store.list("l") == ["l/a", "l/b.c", "l/b/1", "l/b/2"]
    assert store.list("l/") == store.list("l")
    assert store.list("l/b") == ["l/b/1", "l/b/2"]
    assert store.list("none") == []
    assert store.list("") == sorted(keys)


def test_folders_are_those_directly_below(store):
    for key in ["f/b/2", "f/b/1/x", "f/a", "fx/other", "f/c/d/e"]:
        store.put(key, b"x")
    assert store.folders("f") == ["b", "c"]
    assert store.folders("f/") == ["b", "c"]
    assert store.folders("f/b") == ["1"]
    assert store.folders("none") == []
    assert store.folders("") == ["f", "fx"]


def test_delete_skips_absent_and_deletes_many(store):
    keys = [f"d/{index:04d}" for index in range(30)]
    for key in keys:
        store.put(key, b"x")
    store.delete([*keys[:29], "d/never", "d/0000/below"])
    store.delete([])
    assert store.list("d") == keys[29:]


HOSTILE = [
    "",
    "/a",
    "a//b",
    "a/",
    "..",
    "a/../b",
    "a/..",
    "a..b",
    ".",
    "./a",
    "a/./b",
    "~",
    ".staging/x",
    7,
    None,
    b"a",
]
SYNTAX = ["a b", "a\\b", "a\nb", "a\0b", "a*", "a?b", "a[1]", "ä", "a%2e", "a?versionId=1"]
LONG = ["x" * 201, "/".join(["x" * 100] * 10)]


@pytest.mark.parametrize("key", [*HOSTILE, *SYNTAX, *LONG])
def test_hostile_keys_are_refused_by_every_method(store, tmp_path, key):
    source = tmp_path / "file"
    source.write_bytes(b"x")
    for call in (
        lambda: store.put(key, b"x"),
        lambda: store.create(key, b"x"),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.delete(["fine", key]),
        lambda: store.put_file(key, str(source)),
        lambda: store.get_file(key, str(tmp_path / "out")),
    ):
        with pytest.raises(ValueError, match="object key"):
            call()


def test_keys_that_must_work(store):
    keys = [".probe/x", "a-b_c.d=e+f@g,h/1.arrow", "checkpoints/1/zero_pp_rank_0_mp_rank_00_optim_states.pt", "x" * 200]
    for key in keys:
        store.put(key, key.encode())
    assert [store.get(key).decode() for key in keys] == keys
    assert store.list("") == sorted(keys)


def test_threads_race_for_create(store):
    def attempt(key, writer, barrier):
        barrier.wait()
        return store.create(key, str(writer).encode())

    for round_number in range(5):
        key, barrier = f"race/{round_number}", threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda writer, k=key, b=barrier: attempt(k, writer, b), range(8)))
        assert won.count(True) == 1
        assert store.get(key) == str(won.index(True)).encode()


RACER = """
import json, sys
from infra.object_store import open_store
store = open_store(sys.argv[1])
store.exists("warm-up")
print("ready", flush=True)
sys.stdin.readline()
won = [index for index in range(20) if store.create(f"processes/{index}", sys.argv[2].encode())]
print(json.dumps(won))
"""


def test_processes_race_for_create(store):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, store.url, name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    with ending(*racers):
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sorted(chain.from_iterable(won)) == list(range(20))
    for name, indices in zip("abc", won, strict=True):
        assert all(store.get(f"processes/{index}") == name.encode() for index in indices)


def test_pickle_keeps_configuration_only(store):
    store.put("p", b"1")  # so that there are connections which must not travel
    frozen = pickle.dumps(store)
    copy = pickle.loads(frozen)
    try:
        assert copy == store
        assert copy.get("p") == b"1"
    finally:
        if isinstance(copy, S3ObjectStore):
            copy.close()
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY")
    assert len(frozen) < 1000
    assert not secret or secret.encode() not in frozen
    assert not secret or secret not in repr(store) + repr(vars(store))


@pytest.mark.parametrize("size", [0, 5, 40 * MIB + 17])
def test_files(store, tmp_path, size):
    source, target = tmp_path / "source", tmp_path / "deep" / "er" / "target"
    source.write_bytes(os.urandom(1 << 16) * (size >> 16) + os.urandom(size & 0xFFFF))
    assert source.stat().st_size == size
    store.put_file("files/one", str(source))
    store.get_file("files/one", str(target))
    assert target.read_bytes() == source.read_bytes()
    assert store.get("files/one") == source.read_bytes()
    assert list(target.parent.iterdir()) == [target]


def test_get_file_replaces_the_target(store, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"old and longer")
    store.put("f", b"new")
    store.get_file("f", str(target))
    assert target.read_bytes() == b"new"


def test_put_file_without_a_file(store, tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        store.put_file("f", str(tmp_path / "none"))
    assert not store.exists("f")


def test_large_object_is_one_object(store):
    data = os.urandom(MIB) * 101  # beyond s3fs's single PUT
    store.put("large", data)
    assert store.get("large") == data


def test_killed_writers_leave_nothing_visible(tmp_path):
    store = LocalObjectStore(tmp_path / "store")
    store.put("a/whole", b"x")
    dead, writing = (tmp_path / "store" / ".staging" / name for name in ("dead", "writing"))
    for leftover in (dead, writing):
        leftover.write_bytes(b"half")
    long_ago = time.time() - 7 * 24 * 3600
    os.utime(dead, (long_ago, long_ago))
    assert store.list("") == ["a/whole"]
    LocalObjectStore(tmp_path / "store").put("b", b"x")  # a new process sweeps once
    assert not dead.exists()
    assert writing.exists()
    assert store.list("") == ["a/whole", "b"]


def test_local_key_below_a_key_is_an_error_and_not_a_lost_write(tmp_path):
    store = LocalObjectStore(tmp_path)
    store.put("a/b", b"x")
    with pytest.raises(OSError, match="a"):
        store.put("a", b"y")
    with pytest.raises(IsADirectoryError, match="folder of other keys"):
        store.create("a", b"y")
    with pytest.raises(NotADirectoryError):
        store.create("a/b/c", b"y")
    assert store.list("") == ["a/b"]
    assert list((tmp_path / ".staging").iterdir()) == []


WRITER = """
import itertools, sys
from infra.object_store import open_store
store = open_store(sys.argv[1])
store.put("kill/ready", b"x")
print("ready", flush=True)
for index in itertools.count():
    store.create(f"kill/{index:06d}", b"%06d" % index * 20000)
"""


def test_kill_9_leaves_whole_objects_or_none(store):
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, store.url], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        with ending(writer):
            assert writer.stdout.readline() == "ready\n"
            while len(store.list("kill")) < 5:  # it is in the middle of writing
                pass
        for key in store.list("kill"):
            if key != "kill/ready":
                assert store.get(key) == key.removeprefix("kill/").encode() * 20000
        store.delete(store.list("kill"))


def test_s3_keeps_its_data_over_a_crash_of_the_server(tmp_path, monkeypatch):
    from tests.fixtures.s3_server import S3Server

    with S3Server(tmp_path, bucket="crash") as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        store = S3ObjectStore("crash", uuid.uuid4().hex)
        assert store.create("a", b"1")
        server.kill()
        assert server.pid is None
        server.start()
        assert store.get("a") == b"1"
        assert not store.create("a", b"2")
        store.close()
    assert (tmp_path / "s3.json").stat().st_mode & 0o777 == 0o600
    continued = S3Server(tmp_path, bucket="crash")
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    assert [continued.env()[key] for key in keys] == [server.env()[key] for key in keys]


def test_open_store_forms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("rel/store").url == str(tmp_path / "rel" / "store")
    assert open_store(f"file://{tmp_path}/x") == LocalObjectStore(tmp_path / "x")
    assert open_store("s3://bucket/a/b/").url == "s3://bucket/a/b"
    assert open_store("s3://bucket").url == "s3://bucket"
    for bad in (
        "",
        "file://",
        "gs://bucket/x",
        "s3:/bucket",
        "s3://",
        "s3://b",
        "s3://bucket/../x",
        "s3://bucket/a//b",
    ):
        with pytest.raises(ValueError, match="store url"):
            open_store(bad)
    assert not (tmp_path / "rel").exists()
