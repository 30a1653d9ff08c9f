"""Runs on real GPUs: trainer and engine share a device, and one of them dies. Skipped where there is no CUDA device.

Bit-identity is not asserted here: CUDA's backward kernels add in any order. What is: the run ends, and its store proves it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

CLI = [sys.executable, "-m", "flows.cli"]
SETTINGS = [
    "model.source=builtin:smollm2-135m",
    "iterations=3",
    "checkpoint.every=1",
    "tracking.tensorboard=false",
    "generate.prompts_per_iteration=32",
    "generate.samples_per_prompt=8",
    "generate.max_new_tokens=24",
    "prompts.heldout=8",
]


def gpus() -> int:
    """CUDA devices of this machine."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return listed.count("GPU ")


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.skipif(gpus() == 0, reason="no CUDA device")]


class Home:
    """A folder with services of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "RLHF_HOME": str(folder / "h")}

    def command(self, *arguments: str) -> list[str]:
        """`rlhf` with these words; ``train`` gets the settings of the tests."""
        words = [part for setting in SETTINGS for part in ("--set", setting)] if arguments[0] == "train" else []
        return [*CLI, *arguments, *words]

    def rlhf(self, *arguments: str) -> str:
        """Run to the end; its output."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start and go on; the output is in ``log``."""
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                self.command(*arguments), cwd=self.folder, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def proven(self, run: str) -> bool:
        """What the audit says."""
        return bool(json.loads(self.rlhf("audit", run, "--json"))["proven"])


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Services for all tests here; they start with the first run."""
    folder = Path(tempfile.mkdtemp(prefix="rg-"))
    place = Home(folder)
    yield place
    subprocess.run([*CLI, "down"], cwd=folder, env=place.environment, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def wait(condition: Callable[[], object], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def actors(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if " ".join(process.cmdline()).startswith(f"ray::{name}"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_run_on_shared_gpus(home):
    home.rlhf("train", "one-gpu", "--run", "whole")
    view = json.loads(home.rlhf("show", "whole", "--json"))
    assert view["state"] == "complete"
    for row in view["iterations"]:
        assert row["metrics"]["sync/probe_gap"] < 0.15
        assert row["metrics"]["mismatch/log_ratio_abs"] < 0.15
    assert home.proven("whole")


@pytest.mark.parametrize("victim", ["RolloutActor", "TrainerActor"])
def test_a_worker_that_dies_is_rebuilt(home, victim):
    run = f"dies-{victim.lower()}"
    driver = home.start("train", "one-gpu", "--run", run)
    try:
        commit = home.folder / f".rlhf/store/runs/{run}/iterations/000001/commits/score.json"
        wait(lambda: commit.exists() or driver.poll() is not None)
        for process in actors(victim):
            process.kill()
        assert driver.wait(600) == 0, (home.folder / "log").read_text()[-6000:]
    finally:
        driver.kill()
    assert home.proven(run)


def test_a_driver_that_dies_in_an_update_is_continued(home):
    driver = home.start("train", "one-gpu", "--run", "driver")
    try:
        commit = home.folder / ".rlhf/store/runs/driver/iterations/000001/commits/advantages.json"
        wait(lambda: commit.exists() or driver.poll() is not None)
        driver.send_signal(signal.SIGKILL)
        driver.wait(30)
    finally:
        driver.kill()
    before = commit.read_bytes()
    home.rlhf("resume", "driver")
    assert commit.read_bytes() == before
    assert home.proven("driver")


@pytest.mark.skipif(gpus() < 2, reason="fewer than two CUDA devices")
def test_two_ranks_become_one(home):
    home.rlhf("train", "one-gpu", "--run", "two", "--set", "resources.trainer_ranks=2", "--set", "resources.engines=2")
    home.rlhf("rerun", "two", "--iteration", "2", "--from", "advantages", "--no-train")
    home.rlhf("resume", "two", "--new-topology", "resources.trainer_ranks=1", "--new-topology", "resources.engines=1")
    assert home.proven("two")
