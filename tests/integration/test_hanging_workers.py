"""Workers that hang are found and ended; those that are slow or wait are left alone. On real Ray actors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIO = Path(__file__).parents[1] / "fixtures" / "hanging_actors.py"


@pytest.fixture(scope="module")
def report():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # Ray counts the memory of the whole machine and would kill actors because of what else runs on it.
    environment |= {"PYTHONPATH": str(SCENARIO.parents[2]), "RAY_memory_monitor_refresh_ms": "0"}
    done = subprocess.run(
        [sys.executable, str(SCENARIO)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


def test_a_stopped_process_is_found_by_its_silence(report):
    kind, text = report["outcomes"]["stopped"]
    assert kind == "WorkerDied"
    assert text.startswith("work: stopped-0 has not answered for ")
    assert text.endswith(": it was ended")


def test_a_loop_that_makes_no_step_is_found_though_it_answers(report):
    kind, text = report["outcomes"]["spinning"]
    assert kind == "WorkerDied"
    assert text.startswith("work: spinning-0 answers, but has not moved for ")
    assert "it was in work" in text


@pytest.mark.parametrize(
    ("worker", "answer"),
    [("slow", "done"), ("waiting_for_the_store", "False"), ("waiting_for_a_function", "scored")],
)
def test_those_that_are_slow_or_wait_are_left_alone(report, worker, answer):
    assert report["outcomes"][worker][1] == answer


def test_processes_that_hang_are_gone(report):
    assert report["still there"] == []


def test_a_worker_that_others_wait_for_is_named(report):
    kind, text = report["beside"]
    assert kind == "WorkerDied"
    assert "work: engine-0 has not answered for " in text


def test_the_first_that_hangs_ends_the_call_for_all(report):
    kind, text = report["together"]
    assert kind == "WorkerDied"
    assert "work: rank-2 has not answered for " in text
