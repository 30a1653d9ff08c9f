"""Outlasting an outage: what is tried again, for how long, what is not, and what the log says. No server needed."""

from __future__ import annotations

import errno
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, FlexibleChecksumError

from infra.object_store import LocalObjectStore, PatientStore, S3ObjectStore, bare_store, open_store, probe_store
from infra.object_store.patient import may_pass
from infra.object_store.s3_errors import explain
from rlhf_core import layout
from rlhf_core.manifests import TargetRecord
from rlhf_core.ports import ObjectStore
from rlhf_core.records import commit_record, find_record

LONG = 60.0


class Flaky(LocalObjectStore):
    """Fails the first ``times`` calls of every operation with ``error``, before or (``late``) after doing them."""

    def __init__(self, root, times, error=None, late=False):
        super().__init__(root)
        self.times, self.error, self.late = times, error or ConnectionError("the store is away"), late
        self.calls = []

    def _faulty(self, name, *arguments):
        self.calls.append(name)
        fails = self.calls.count(name) <= self.times
        if fails and not self.late:
            raise self.error
        result = getattr(LocalObjectStore, name)(self, *arguments)
        if fails:
            raise self.error
        return result

    def put(self, key, data):
        return self._faulty("put", key, data)

    def create(self, key, data):
        return self._faulty("create", key, data)

    def get(self, key):
        return self._faulty("get", key)

    def exists(self, key):
        return self._faulty("exists", key)

    def list(self, prefix):
        return self._faulty("list", prefix)

    def delete(self, keys):
        return self._faulty("delete", keys)

    def put_file(self, key, path):
        return self._faulty("put_file", key, path)

    def get_file(self, key, path):
        return self._faulty("get_file", key, path)


def test_every_operation_outlasts_failures(tmp_path):
    inner = Flaky(tmp_path / "store", times=2)
    store = PatientStore(inner, LONG)
    assert isinstance(store, ObjectStore)
    (tmp_path / "source").write_bytes(b"file")
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert store.create("b", b"2")
    assert store.exists("b")
    store.put_file("c", str(tmp_path / "source"))
    store.get_file("c", str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == b"file"
    assert store.list("") == ["a", "b", "c"]
    store.delete(["a", "b"])
    assert bare_store(store).list("") == ["c"]
    names = ("put", "get", "create", "exists", "put_file", "get_file", "delete")
    assert [inner.calls.count(name) for name in names] == [3] * len(names)


def test_repeated_create_is_one_commit(tmp_path):
    inner = Flaky(tmp_path, times=1, late=True)  # the object is written, the answer lost
    record = TargetRecord(iterations=7)
    committed, mine = commit_record(PatientStore(inner, LONG), layout.run_target("r"), record)
    assert mine
    assert inner.calls.count("create") == 2
    assert find_record(LocalObjectStore(tmp_path), layout.run_target("r"), TargetRecord) == committed


@pytest.mark.parametrize(
    "kind", [FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, ValueError]
)
def test_answers_are_not_repeated(tmp_path, kind, caplog):
    inner = Flaky(tmp_path, times=1, error=kind("no"))
    with pytest.raises(kind, match="no"):
        PatientStore(inner, LONG).get("a")
    assert inner.calls == ["get"]
    assert caplog.records == []


def s3_error(code, status):
    """As S3ObjectStore raises it for this answer."""
    answer = ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")
    translated = OSError(errno.EIO, code)
    translated.__cause__ = answer
    explained = explain(translated, "s3://bucket", "key")
    explained.__cause__ = translated
    return explained


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("SlowDown", 503, True),
        ("InternalError", 500, True),
        ("BadGateway", 502, True),
        ("OperationAborted", 409, True),
        ("429", 429, True),
        ("RequestTimeout", 400, True),
        ("BadDigest", 400, True),
        ("IncompleteBody", 400, True),
        ("NoSuchBucket", 404, False),
        ("NoSuchKey", 404, False),
        ("AccessDenied", 403, False),
        ("InvalidAccessKeyId", 403, False),
        ("RequestTimeTooSkewed", 403, False),
        ("PermanentRedirect", 301, False),
        ("InvalidRequest", 400, False),
        ("EntityTooLarge", 400, False),
        ("NotImplemented", 501, False),
    ],
)
def test_which_s3_errors_may_pass(code, status, expected):
    assert may_pass(s3_error(code, status)) is expected


def test_which_other_errors_may_pass(tmp_path):
    for cause, expected in (
        (EndpointConnectionError(endpoint_url="http://x"), True),
        (TimeoutError("mute"), True),
        (FlexibleChecksumError(error_msg="Expected checksum A did not match B"), False),
    ):
        error = explain(cause, "s3://bucket", "key")
        error.__cause__ = cause
        assert may_pass(error) is expected
    assert may_pass(OSError(errno.ENOSPC, "full"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("s3://b: 'a': the endpoint does not answer"), ConnectionError),
        (OSError("s3://b: 'a': SlowDown"), OSError),
        (TimeoutError(errno.ETIMEDOUT, "mute"), TimeoutError),
    ],
)
def test_patience_ends(tmp_path, error, kind):
    inner = Flaky(tmp_path, times=10**9, error=error)
    with pytest.raises(kind, match=r"\(tried \d+ times in \d+ s\)") as caught:
        PatientStore(inner, 0.6).get("a")
    assert type(caught.value) is kind
    assert (error.strerror or str(error)) in str(caught.value)
    assert caught.value.__cause__ is error
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_patience_is_one_call(tmp_path, caplog):
    inner = Flaky(tmp_path, times=1)
    with pytest.raises(ConnectionError, match=r"^the store is away$"):
        PatientStore(inner, 0).get("a")
    assert inner.calls == ["get"]
    assert caplog.records == []


def test_an_answer_ends_the_wait_also_when_it_is_no(tmp_path, caplog):
    with pytest.raises(FileNotFoundError):
        PatientStore(Flaky(tmp_path, times=2), LONG).get("nothing")
    assert "answers again" in caplog.text


class Switched(LocalObjectStore):
    """Away until ``back`` is set; ``noticed`` counts down as calls fail for the first time."""

    def __init__(self, root, callers):
        super().__init__(root)
        self.back, self.everybody = threading.Event(), threading.Barrier(callers, timeout=60)
        self.local = threading.local()

    def get(self, key):
        if not self.back.is_set():
            if not hasattr(self.local, "failed"):
                self.local.failed = True
                self.everybody.wait()
            raise ConnectionError(f"away, asked for {key}")
        return super().get(key)


def test_one_outage_is_two_lines_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    inner = Switched(tmp_path, callers=5)
    for index in range(4):
        inner.put(str(index), b"x")
    store = PatientStore(inner, LONG)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(store.get, str(index)) for index in range(4)]
        inner.everybody.wait()  # all four have failed at least once
        inner.back.set()
        assert [call.result() for call in calls] == [b"x"] * 4
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"{tmp_path} fails, trying again for up to 60 s: away, asked for")
    assert second.startswith(f"{tmp_path} answers again after ")


def test_next_outage_is_logged_again(tmp_path, caplog):
    store = PatientStore(Flaky(tmp_path, times=1), LONG)
    store.put("a", b"1")
    store.get("a")
    assert [record.getMessage().split()[1] for record in caplog.records] == ["fails,", "answers"] * 2


def test_pickle_keeps_configuration_only(tmp_path):
    store = PatientStore(LocalObjectStore(tmp_path), 5.0)
    with pytest.raises(FileNotFoundError):
        store.get("a")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert hash(copy) == hash(store)
    assert copy != PatientStore(store.inner, 6.0)
    assert copy != store.inner
    copy.put("a", b"1")
    assert store.get("a") == b"1"
    assert (copy.url, repr(copy)) == (str(tmp_path), f"PatientStore(LocalObjectStore({str(tmp_path)!r}), 5)")


def test_pickled_in_an_outage(tmp_path):
    inner = Switched(tmp_path, callers=2)
    inner.put("a", b"1")
    store = PatientStore(inner, LONG)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.get, "a")
        inner.everybody.wait()
        assert store.__reduce__() == (PatientStore, (inner, LONG))  # what pickle takes; Switched itself holds locks
        inner.back.set()
        assert call.result() == b"1"


def test_open_store_with_patience(tmp_path):
    store = open_store(str(tmp_path), 5.0)
    assert store == PatientStore(LocalObjectStore(tmp_path), 5.0)
    assert bare_store(store) == LocalObjectStore(tmp_path)
    assert bare_store(bare_store(store)) == LocalObjectStore(tmp_path)
    remote = open_store("s3://bucket/x", patience_seconds=900)
    assert isinstance(remote, PatientStore)
    assert remote.inner == S3ObjectStore("bucket", "x")
    assert open_store(str(tmp_path), 0.0) == LocalObjectStore(tmp_path)
    remote.close()
    store.close()


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_patience_is_a_number_of_seconds(tmp_path, seconds):
    with pytest.raises(ValueError, match="patience"):
        open_store(str(tmp_path), seconds)


def test_probe_does_not_wait(tmp_path, caplog):
    probe_store(open_store(str(tmp_path / "good"), LONG))
    inner = Flaky(tmp_path / "bad", times=10**9)
    with pytest.raises(OSError, match="the store is away"):
        probe_store(PatientStore(inner, LONG))
    assert inner.calls.count("create") == 1
    assert caplog.records == []
