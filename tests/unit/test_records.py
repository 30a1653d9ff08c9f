"""Sealed records: canonical form, commit by put-if-absent, lost answers, damage, newer formats."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3

from infra.object_store import LocalObjectStore
from rlhf_core.errors import CorruptObject, IntegrityError, NotCommitted
from rlhf_core.manifests import FORMAT_VERSION, Manifest, RunSummary, StageManifest
from rlhf_core.records import canonical, commit_record, digest, find_record, load_record, seal

KEY = "runs/r/iterations/000000/commits/update.json"


def record(**more):
    fields = {
        "run": "r",
        "iteration": 0,
        "stage": "update",
        "attempt": "a",
        "policy_version": 1,
        "metrics": {"b": 1, "a": 0.1},
    }
    return StageManifest(**{**fields, **more})


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path)


def test_canonical_form():
    assert canonical({"b": [1, 1.5, None, True], "a": "ü"}) == b'{"a":"\\u00fc","b":[1,1.5,null,true]}'
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


def test_digest_is_blake3():
    assert digest(b"abc") == blake3(b"abc").hexdigest()
    assert len(digest(b"")) == 64


def test_seal_covers_every_other_field():
    sealed = seal(record())
    assert seal(sealed) == sealed
    assert record().digest == ""
    assert sealed.digest != seal(record(attempt="b")).digest
    assert sealed.digest != seal(record(metrics={"a": 0.1})).digest
    assert sealed.model_copy(update={"digest": ""}) == record()


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"metrics": {"loss": float("nan")}}, "metrics.loss = nan"),
        ({"details": {"x": [1, (float("inf"),)]}}, r"details.x\[1\]\[0\] = inf"),
    ],
)
def test_seal_refuses_what_json_cannot_hold(more, where):
    with pytest.raises(ValueError, match=where):
        seal(record(**more))


def test_commit_and_load(store):
    details = {"tuple": (1, 2.5), "none": None, "text": "ü\n", "small": 1e-300, "large": 2**60}
    committed, mine = commit_record(store, KEY, record(details=details))
    assert mine
    loaded = load_record(store, KEY, StageManifest)
    assert loaded.digest == committed.digest
    assert loaded.details == {**details, "tuple": [1, 2.5]}
    assert seal(loaded) == loaded
    assert find_record(store, KEY, StageManifest) == loaded


def test_second_commit_gets_the_first(store):
    first, _ = commit_record(store, KEY, record())
    other, mine = commit_record(store, KEY, record(attempt="b"))
    assert (other, mine) == (first, False)
    assert commit_record(store, KEY, record()) == (first, True)


def test_absent(store):
    assert find_record(store, KEY, StageManifest) is None
    with pytest.raises(NotCommitted, match=KEY):
        load_record(store, KEY, StageManifest)


class Unreliable(LocalObjectStore):
    """Its create loses the answer: before or after the write, with an error or a wrong False."""

    written, error = True, True

    def create(self, key, data):
        if self.written:
            super().create(key, data)
        if self.error:
            raise ConnectionError("answer lost")
        return False


def test_lost_answer_after_the_write_is_recognised(tmp_path):
    for error in (True, False):
        store = Unreliable(tmp_path / str(error))
        store.error = error
        assert commit_record(store, KEY, record()) == (seal(record()), True)
        assert commit_record(store, KEY, record(attempt="b")) == (seal(record()), False)


def test_failed_write_is_raised(tmp_path):
    store = Unreliable(tmp_path)
    store.written = False
    with pytest.raises(ConnectionError, match="answer lost"):
        commit_record(store, KEY, record())
    store.error = False
    with pytest.raises(OSError, match="cannot be read"):
        commit_record(store, KEY, record())


def rewrite(store, **changes):
    commit_record(store, KEY, record())
    body = json.loads(store.get(KEY)) | changes
    store.put(KEY, canonical({name: value for name, value in body.items() if value is not None}))


def test_changed_records_are_refused(store):
    rewrite(store, policy_version=2)
    with pytest.raises(CorruptObject, match="was changed"):
        load_record(store, KEY, StageManifest)
    with pytest.raises(CorruptObject, match="was changed"):
        commit_record(store, KEY, record(attempt="b"))


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[]", b"null", b'{"format":1}', b'{"digest":"x","format":true}'])
def test_broken_records_are_refused(store, raw):
    store.put(KEY, raw)
    with pytest.raises(CorruptObject, match=KEY):
        find_record(store, KEY, StageManifest)


def test_nan_in_a_stored_record_is_refused(store):
    store.put(KEY, b'{"digest":"x","format":1,"a":NaN}')
    with pytest.raises(CorruptObject, match="JSON"):
        find_record(store, KEY, StageManifest)


def test_newer_format_names_both_versions(store):
    rewrite(store, format=FORMAT_VERSION + 1, new_field=1)
    with pytest.raises(
        IntegrityError, match=f"format {FORMAT_VERSION + 1}, this version reads formats up to {FORMAT_VERSION}"
    ):
        load_record(store, KEY, StageManifest)


def test_record_of_another_kind_is_refused(store):
    class Other(Manifest):
        format: int = FORMAT_VERSION
        digest: str = ""
        name: str

    commit_record(store, KEY, Other(name="x"))
    with pytest.raises(CorruptObject, match="no StageManifest"):
        load_record(store, KEY, StageManifest)


def test_only_records_can_be_sealed():
    with pytest.raises(TypeError, match="RunSummary"):
        seal(RunSummary(run="a", iterations=1, policy_version=1))
