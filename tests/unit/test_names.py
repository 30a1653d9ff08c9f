"""Names that runs share a cluster by."""

from __future__ import annotations

from rlhf_core.config import parse_config
from tasks.cluster import reservation_name
from tasks.names import namespace_of


def reservation(url):
    return reservation_name(parse_config({"run": "r", "storage": {"url": url}}))


def test_runs_of_one_name_in_two_stores_have_nothing_in_common():
    urls = ["s3://bucket/a", "s3://bucket/b", "s3://other/a", "/tmp/a", "/tmp/b"]
    assert len({namespace_of(url) for url in urls}) == len(urls)
    assert len({reservation(url) for url in urls}) == len(urls)


def test_a_store_is_the_same_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert namespace_of("store") == namespace_of(str(tmp_path / "store")) == namespace_of(f"file://{tmp_path}/store")
    assert namespace_of("s3://bucket/a") == namespace_of("s3://bucket/a/")


def test_who_holds_devices_can_be_read_from_the_name():
    assert reservation("/tmp/a").partition("/")[2] == "r"
