"""A checkpoint's files between the ranks' disks and the store: whose they are, that they come back, and what is refused."""

from __future__ import annotations

import errno
import os
import pickle
import random
from collections import OrderedDict

import pytest
import torch

from infra.object_store import LocalObjectStore
from rlhf_core.actors.checkpointing import (
    CheckpointUpload,
    Room,
    SavedCheckpoint,
    fetch,
    files_of_rank,
    lack_of_room,
    own_files,
    require_harmless,
)
from rlhf_core.errors import CorruptObject
from rlhf_core.files import download_files, file_digest, upload_files
from rlhf_core.manifests import StoredFile

PREFIX = "runs/r/checkpoints/0000000001/a1"
#: What DeepSpeed writes for two ranks -> the rank.
NAMES = {
    "latest": 0,
    "v1/mp_rank_00_model_states.pt": 0,
    "v1/zero_pp_rank_0_mp_rank_00_model_states.pt": 0,
    "v1/zero_pp_rank_1_mp_rank_00_model_states.pt": 1,
    "v1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": 0,
    "v1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": 1,
    "v1/zero_pp_rank_11_mp_rank_00_optim_states.pt": 11,
}


class RunsCode:
    """What an attacker would put into a checkpoint."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def saved(tmp_path):
    """What the ranks have saved."""
    folder = tmp_path / "saved"
    for number, name in enumerate(NAMES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".pt":
            torch.save({"weights": torch.full((50,), float(number)), "step": number}, path)
        else:
            path.write_text("v1")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def uploaded(store, folder):
    return upload_files(store, folder, [path for path in folder.rglob("*") if path.is_file()], PREFIX)


def test_every_file_belongs_to_one_rank(saved):
    for rank in (0, 1, 11):
        mine = {path.relative_to(saved).as_posix() for path in own_files(saved, rank)}
        assert mine == {name for name, owner in NAMES.items() if owner == rank}
    assert own_files(saved, 2) == []
    assert own_files(saved / "nowhere", 0) == []


def test_what_was_uploaded_comes_back(store, saved, tmp_path):
    files = uploaded(store, saved)
    assert sorted(file.key for file in files) == store.list("") == sorted(f"{PREFIX}/{name}" for name in NAMES)
    before = contents(saved)
    for rank in (0, 1, 11):
        target = tmp_path / f"rank-{rank}"
        fetch(store, files, rank, target)
        assert contents(target) == {name: before[name] for name, owner in NAMES.items() if owner == rank}
        assert {file.path for file in files_of_rank(files, rank)} == set(contents(target))
    fetch(store, files, 3, tmp_path / "rank-3")
    assert not (tmp_path / "rank-3").exists()


def test_an_empty_file_and_one_of_many_pages(store, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "empty").touch()
    (folder / "large").write_bytes(random.Random(0).randbytes(3_000_001))
    files = upload_files(store, folder, folder.iterdir(), "x")
    download_files(store, files, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "missing"])
def test_a_damaged_file_is_refused_and_does_not_stay(store, saved, tmp_path, damage):
    files = uploaded(store, saved)
    bad = next(file for file in files if file.path.startswith("v1/bf16_zero_pp_rank_1"))
    data = bytearray(store.get(bad.key))
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-1]
    elif damage == "swap":
        data = bytearray(store.get(bad.key.replace("rank_1", "rank_0")))
    store.delete([bad.key])
    if damage != "missing":
        store.put(bad.key, bytes(data))
    target = tmp_path / "rank-1"
    with pytest.raises(CorruptObject, match="bf16_zero_pp_rank_1"):
        fetch(store, files, 1, target)
    assert bad.path not in contents(target)
    fetch(store, files, 0, tmp_path / "rank-0")  # the other rank's files are whole


def test_what_the_store_calls_damaged_is_damaged(store, saved, tmp_path):
    class Checking(LocalObjectStore):
        error = errno.EBADMSG

        def get_file(self, key, path):
            raise OSError(self.error, "checksum")

    files = uploaded(store, saved)
    checking = Checking(store.root)
    with pytest.raises(CorruptObject, match="checksum"):
        fetch(checking, files, 1, tmp_path / "rank-1")
    Checking.error = errno.EIO
    with pytest.raises(OSError, match="checksum"):
        fetch(checking, files, 1, tmp_path / "rank-1")


@pytest.mark.parametrize("path", ["../outside.pt", "/outside.pt", "v1/../../outside.pt"])
def test_nothing_is_written_outside_of_the_folder(store, tmp_path, path):
    store.put("key", b"x")
    file = StoredFile(path=path, key="key", bytes=1, blake3="0" * 64)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="relative path"):
        fetch(store, [file], 0, tmp_path / "deep" / "rank-0")
    assert contents(tmp_path) == before


def test_what_our_checkpoints_hold_passes(tmp_path):
    path = tmp_path / "good.pt"
    state = {
        "module": OrderedDict(weight=torch.zeros(3, dtype=torch.bfloat16), bias=torch.nn.Parameter(torch.ones(2))),
        "optimizer": {
            "state": {0: {"step": 3, "exp_avg": torch.zeros(2)}},
            "groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}],
        },
        "rng": [torch.get_rng_state(), "text", None, True, {1, 2}],
        "dtype": torch.float32,
        "size": torch.Size([1, 2]),
    }
    torch.save(state, path)
    require_harmless(path, "key")
    assert torch.load(path, weights_only=True)["rng"][1] == "text"


def test_what_runs_code_is_refused_unread(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "bad.pt"
    torch.save({"weights": torch.zeros(2), "x": [RunsCode(marker)]}, path)
    with pytest.raises(CorruptObject, match=r"runs/r/bad\.pt would run (posix|os)\.system when loaded"):
        require_harmless(path, "runs/r/bad.pt")
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the danger is real
    assert marker.exists()


def test_builtins_are_no_way_around(tmp_path):
    class Evaluates:
        def __reduce__(self):
            return eval, ("1 + 1",)

    path = tmp_path / "bad.pt"
    torch.save(Evaluates(), path)
    with pytest.raises(CorruptObject, match=r"would run builtins\.eval"):
        require_harmless(path, "key")


@pytest.mark.parametrize("form", ["pickle", "protocol 4", "old torch", "text", "empty", "cut off"])
def test_files_in_another_form_are_refused_unread(tmp_path, form):
    marker, path = tmp_path / "marker", tmp_path / "bad.pt"
    danger = {"x": RunsCode(marker)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(danger))
    elif form == "protocol 4":
        torch.save(danger, path, pickle_protocol=4)
    elif form == "old torch":
        torch.save(danger, path, _use_new_zipfile_serialization=False)
    elif form == "text":
        path.write_text("latest")
    elif form == "empty":
        path.touch()
    else:
        torch.save({"x": torch.zeros(100)}, path)
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptObject, match=r"runs/r/bad\.pt .*refused"):
        require_harmless(path, "runs/r/bad.pt")
    assert not marker.exists()


def test_fetch_refuses_what_runs_code(store, saved, tmp_path):
    marker = tmp_path / "marker"
    torch.save(RunsCode(marker), saved / "v1" / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    files = uploaded(store, saved)
    with pytest.raises(CorruptObject, match=r"a1/v1/zero_pp_rank_1_mp_rank_00_model_states\.pt would run"):
        fetch(store, files, 1, tmp_path / "rank-1")
    assert not marker.exists()


def test_an_upload_takes_the_ranks_own_files_and_deletes_them(store, saved, tmp_path):
    before = contents(saved)
    upload = CheckpointUpload(store, 1, "a1", saved, PREFIX, 1)
    assert upload.state == SavedCheckpoint(1, "a1")
    assert upload.wait() == SavedCheckpoint(1, "a1")  # not begun
    upload.start()
    state = upload.wait()
    mine = {name for name, owner in NAMES.items() if owner == 1}
    assert state == upload.state
    assert (state.version, state.attempt, state.error) == (1, "a1", None)
    assert {file.path: file.key for file in state.files} == {name: f"{PREFIX}/{name}" for name in mine}
    assert contents(saved) == {name: data for name, data in before.items() if name not in mine}
    fetch(store, state.files, 1, tmp_path / "back")
    assert contents(tmp_path / "back") == {name: before[name] for name in mine}


def test_an_upload_that_fails_says_so_and_leaves_no_files(saved, tmp_path):
    class Full(LocalObjectStore):
        def put_file(self, key, path):
            raise OSError(errno.ENOSPC, "no space in the store")

    upload = CheckpointUpload(Full(tmp_path / "store"), 7, "a1", saved, PREFIX, 0)
    upload.start()
    state = upload.wait()
    assert (state.version, state.files) == (7, None)
    assert "OSError" in state.error
    assert "no space in the store" in state.error
    assert set(contents(saved)) == {name for name, owner in NAMES.items() if owner != 0}


def test_digests_are_of_the_content(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"x" * 100)
    other.write_bytes(b"x" * 100)
    assert file_digest(one) == file_digest(other)
    other.write_bytes(b"x" * 99 + b"y")
    assert file_digest(one) != file_digest(other)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("rooms", "lack"),
    [
        ([Room("a 1", "/x", 60 * MIB, 100 * MIB)], None),
        ([Room("a 1", "/x", 120 * MIB, 100 * MIB)], "/x has 100 MiB free, it takes about 120 MiB"),
        ([Room("a 1", "/x", 60 * MIB, 100 * MIB)] * 2, "/x has 100 MiB free, it takes about 120 MiB"),
        ([Room("a 1", "/x", 60 * MIB, 100 * MIB), Room("b 1", "/x", 60 * MIB, 100 * MIB)], None),
        (
            [Room("a 1", "/x", 60 * MIB, 100 * MIB), Room("b 1", "/y", 60 * MIB, 5 * MIB)],
            "/y has 5 MiB free, it takes about 60 MiB",
        ),
    ],
    ids=["fits", "does not", "two ranks share the disk", "two disks", "one of two is full"],
)
def test_a_disk_without_room_is_named(rooms, lack):
    assert lack_of_room(rooms) == lack


def test_room_is_that_of_the_disk(tmp_path):
    one, other = Room.at(tmp_path / "a" / "b", 5), Room.at(tmp_path / "c", 7)
    assert one.disk == other.disk
    assert (one.needed, other.needed) == (5, 7)
    assert one.free > 0
    assert lack_of_room([one, other]) is None
