"""What a user is told when the store cannot be used: which error, that it names url, reason and fix, and no secret."""

from __future__ import annotations

import pickle
import socket

import pytest

from infra.object_store import open_store, probe_store
from infra.object_store.s3_errors import explain
from tests.fixtures.s3_server import S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("probe"), bucket="probe") as running:
        yield running


@pytest.fixture
def environment(server, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def failure(url, kind):
    with pytest.raises(kind) as caught:
        probe_store(open_store(url))
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(url)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    return message


def test_good_stores_are_left_as_they_were(environment, tmp_path):
    for url in ("s3://probe/some/prefix", "s3://probe", str(tmp_path / "new" / "folder")):
        store = open_store(url)
        probe_store(store)
        probe_store(store)
        assert store.list("") == []
        getattr(store, "close", lambda: None)()


def test_wrong_secret(environment, server):
    environment.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    message = failure("s3://probe/x", PermissionError)
    assert "SignatureDoesNotMatch" in message
    assert "set AWS_ACCESS_KEY_ID" in message
    assert "not-the-secret" not in message
    assert server.env()["AWS_ACCESS_KEY_ID"] not in message


def test_unknown_key_id(environment):
    environment.setenv("AWS_ACCESS_KEY_ID", "unknown-id")
    message = failure("s3://probe/x", PermissionError)
    assert "InvalidAccessKeyId" in message
    assert "unknown-id" not in message


def test_no_credentials(environment):
    environment.delenv("AWS_ACCESS_KEY_ID")
    environment.delenv("AWS_SECRET_ACCESS_KEY")
    assert "NoCredentials" in failure("s3://probe/x", PermissionError)


def test_missing_bucket_is_not_made(environment):
    for _ in range(2):
        message = failure("s3://no-such-bucket/x", FileNotFoundError)
    assert "bucket does not exist" in message
    with pytest.raises(OSError, match="bucket does not exist") as caught:
        open_store("s3://no-such-bucket/x").get("a")
    assert not isinstance(caught.value, FileNotFoundError)  # not to be read as "nobody wrote it yet"


def test_refused_connection(environment):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        environment.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        message = failure("s3://probe/x", ConnectionError)
    assert f"127.0.0.1:{port}" in message
    assert "AWS_ENDPOINT_URL" in message


@pytest.mark.timeout(60)
def test_endpoint_that_accepts_and_says_nothing(environment):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        environment.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{mute.getsockname()[1]}")
        assert "does not answer" in failure("s3://probe/x", ConnectionError)


def test_endpoint_without_a_scheme(environment):
    environment.setenv("AWS_ENDPOINT_URL_S3", "localhost:9000")
    assert "http(s)://host:port" in failure("s3://probe/x", OSError)


def test_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    message = failure(str(tmp_path / "file" / "store"), OSError)
    assert "choose a folder" in message


def test_server_that_ignores_conditions_is_refused(environment, tmp_path):
    from infra.object_store import LocalObjectStore

    class Careless(LocalObjectStore):
        def create(self, key, data):
            self.put(key, data)
            return True

    with pytest.raises(OSError, match="If-None-Match"):
        probe_store(Careless(tmp_path))


def test_passwords_in_an_endpoint_are_not_shown():
    error = explain(ConnectionError("http://user:hunter2@host:9000/bucket"), "s3://bucket", "key")
    assert isinstance(error, ConnectionError)
    assert "hunter2" not in str(error)
    assert "host:9000" in str(error)
