"""The sync stage on real actors, and an engine that serves what the trainer does not hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infra.services import Service, ServiceStack

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def report(tiny_model):
    """What the scenario saw: one trainer rank, one engine, one iteration, then lies."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-sync-"))  # short, for Ray's sockets
    config = {
        "run": "sync",
        "iterations": 1,
        "model": {"source": str(tiny_model), "dtype": "float32"},
        "prompts": {"heldout": 0, "max_prompt_tokens": 64},
        "generate": {"prompts_per_iteration": 2, "samples_per_prompt": 4, "max_new_tokens": 8},
        "reward": {"functions": [{"function": f"{FIXTURES}/e2e_rewards.py:letters"}]},
        "optim": {"learning_rate": 1e-3},
        "resources": {"kv_cache_gib": 0.1},
    }
    stack = ServiceStack(folder / ".rlhf", object_store_memory=100 << 20)
    try:
        with pytest.MonkeyPatch.context() as environment:
            # Ray counts the memory of the whole machine and would kill actors because of what else runs on it.
            environment.setenv("RAY_memory_monitor_refresh_ms", "0")
            services = stack.up(120, services=[Service.RAY]).environment
        command = [sys.executable, str(FIXTURES / "sync_scenario.py"), json.dumps(config)]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **services},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
        yield json.loads(line.removeprefix("REPORT "))
    finally:
        stack.down()
        shutil.rmtree(folder, ignore_errors=True)


def test_an_engine_that_was_not_synced_refuses_to_be_probed(report):
    found = report["not synced"]
    assert found["error"] == "StaleEngine"
    assert "serves policy version 0, not 1" in found["message"]
    assert report["served before"] == 0


def test_old_weights_that_pass_for_new_ones_are_caught_by_the_probe(report):
    accepted = report["old weights under a new name"]["result"]
    assert accepted != report["digest"], "the engine took them: they had arrived as they were sent"
    found = report["probe of old weights"]
    assert found["error"] == "AgreementError"
    assert report["engine"] in found["message"]
    assert "policy version 1" in found["message"]
    assert "the tolerance for float32 is 0.0001" in found["message"]


def test_weights_with_another_digest_are_not_served(report):
    found = report["old weights, digest of the new"]
    assert found["error"] == "IntegrityError"
    assert report["digest"] in found["message"]
    assert report["served after a failed sync"] is None
    found = report["generate after a failed sync"]
    assert found["error"] == "StaleEngine"
    assert "serves policy version None, not 1" in found["message"]


def test_the_trainer_pushes_no_version_that_it_does_not_hold(report):
    found = report["another version from the trainer"]
    assert found["error"] == "RunStateError"
    assert "holds policy version 1, not 5" in found["message"]


def test_sync_repairs_the_engine_and_agrees(report):
    found = report["sync"]
    assert found["served"] == 1
    assert found["details"] == {"engines": [report["engine"]], "weights_digest": report["digest"]}
    assert found["metrics"]["sync/probe_gap"] < 1e-4
    assert found["metrics"]["sync/bytes"] > 20e6


def test_a_replaced_driver_is_refused_by_the_actors(report):
    found = report["replaced driver"]
    assert found["error"] == "FencedOut"
    assert "belongs to lease epoch 2" in found["message"]
