"""The engine computes the plain model's function for families that differ, and a push of unchanged weights changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fixtures" / "family_engines.py"
FAMILIES = ("llama", "mistral-window", "granite", "gemma2")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Family -> what was measured, all in one process of their own."""
    command = [sys.executable, str(SCRIPT), "cpu", str(tmp_path_factory.mktemp("families")), *FAMILIES]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    return {line["family"]: line for line in lines}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_agrees_as_loaded_and_after_a_push(answers, family):
    found = answers[family]
    assert "error" not in found, found["error"]
    assert found["loaded"] < TOLERANCE
    assert found["pushed"] < TOLERANCE
