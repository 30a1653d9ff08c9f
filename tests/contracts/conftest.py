"""Both object stores for the contract tests: a folder, and a real S3 server on loopback."""

from __future__ import annotations

import uuid

import pytest

from infra.object_store import LocalObjectStore, S3ObjectStore
from tests.fixtures.fault_proxy import FaultProxy
from tests.fixtures.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3"), bucket="contracts") as server:
        yield server


@pytest.fixture
def s3_env(s3_server, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path):
    """An empty store; the S3 one has a prefix of its own in the session's bucket."""
    if request.param == "local":
        yield LocalObjectStore(tmp_path / "store")
        return
    request.getfixturevalue("s3_env")
    opened = S3ObjectStore("contracts", f"test/{uuid.uuid4().hex}")
    yield opened
    opened.close()


@pytest.fixture
def proxy(s3_env):
    """A fault-injecting way to the S3 server."""
    with FaultProxy(s3_env.endpoint) as running:
        yield running
