"""The same run in S3, a second driver beside the first, and a finished run that is extended."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

RLHF = str(Path(sys.executable).with_name("rlhf"))
STORE = "s3://e2e/some/prefix"


@pytest.fixture(scope="module")
def store(s3):
    """The store as this process opens it."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in s3.env().items():
            environment.setenv(name, value)
        yield STORE


@pytest.fixture(scope="module")
def in_s3(world, store):
    """Run ``s``: two iterations of the reference's configuration, in S3."""
    return world.train("s", "--set", f"storage.url={STORE}", "--set", "iterations=2", timeout=240)


@pytest.fixture(scope="module")
def extended(world, store, in_s3, until, tmp_path_factory):
    """Run ``s`` started again with a third iteration, and what a second driver said meanwhile."""
    log = tmp_path_factory.mktemp("extended") / "first.log"
    arguments = ["train", str(world.preset), "--run", "s", "--set", f"storage.url={STORE}", "--set", "iterations=3"]
    before = len(world.flow_runs("s"))
    first = world.start(RLHF, *arguments, log=log)
    # Its flow run exists before its lease; the preflight of a second driver must not come before the lease.
    until(lambda: len(world.flow_runs("s")) > before or first.poll() is not None)
    run = world.flow_runs("s")[0]["id"]
    until(lambda: "preflight" in world.task_names(run) or first.poll() is not None)
    lease = "runs/s/lease/000002.json"
    until(lambda: world.exists(lease, STORE) or first.poll() is not None)
    second = world.rlhf(*arguments)
    first.wait(240)
    assert first.returncode == 0, log.read_text()
    return first, second


def test_weights_and_rewards_do_not_depend_on_the_store_and_the_name(world, reference, store, in_s3):
    for iteration in range(2):
        mine, expected = (
            world.record(f"runs/{run}/iterations/{iteration:06d}/DONE.json", url)
            for run, url in (("s", STORE), ("a", None))
        )
        assert mine["weights_digest"] == expected["weights_digest"]
        assert mine["metrics"]["reward/mean"] == expected["metrics"]["reward/mean"]


def test_everything_is_readable_from_s3(world, store, in_s3):
    assert [row["run"] for row in world.json("runs", "--store", STORE)] == ["s"]
    shown = world.json("show", "s", "--store", STORE)
    assert shown["state"] in ("complete", "started")
    assert len(world.json("rollouts", "s", "1", "--store", STORE)) == 8
    export = world.record("runs/s/export/v0000000002.json", STORE)
    assert {file["path"] for file in export["files"]} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert all(world.exists(file["key"], STORE) for file in export["files"])


def test_nothing_of_it_is_in_the_local_store(world, in_s3):
    assert not (world.folder / ".rlhf" / "store" / "runs" / "s").exists()


def test_a_second_driver_is_refused_and_told_who_drives(extended):
    first, second = extended
    assert second.returncode == 3
    assert "run 's' is driven by " in second.stderr
    assert f"@{socket.gethostname()} pid {first.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert first.pid != os.getpid()


def test_more_iterations_continue_a_finished_run(world, reference, store, extended):
    assert [world.weights("s", k, STORE) for k in range(3)] == [world.weights("a", k) for k in range(3)]
    assert [len(world.flow_runs(f"s-it{k:06d}")) for k in range(3)] == [1, 1, 1]
    shown = world.json("show", "s", "--store", STORE)
    assert (shown["state"], shown["iterations_done"]) == ("complete", 3)
    assert world.record("runs/s/export/v0000000003.json", STORE)["weights_digest"] == world.weights("s", 2, STORE)
