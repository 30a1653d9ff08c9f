"""Runs on real GPUs: trainer and engine share a device, and one of them dies. Skipped where there is no CUDA device.

Every disturbed run must end in the bits of one that nobody disturbed, on the same GPU, without any checkpoint.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

CLI = [sys.executable, "-m", "flows.cli"]
SETTINGS = [
    "model.source=builtin:smollm2-135m",
    "iterations=5",
    "checkpoint.every=0",
    "tracking.tensorboard=false",
    "generate.prompts_per_iteration=16",
    "generate.samples_per_prompt=8",
    "generate.max_new_tokens=24",
    "generate.exact_groups=4",
    "generate.engine.enforce_eager=true",
    "evaluation.samples_per_prompt=0",
    "prompts.heldout=4",
]
TWO = ["resources.trainer_ranks=2", "resources.engines=2"]


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

    def command(self, *arguments: str, settings: Sequence[str] = ()) -> list[str]:
        """`rlhf` with these words; ``train`` gets the settings of the tests."""
        chosen = [*SETTINGS, *settings] if arguments[0] == "train" else settings
        return [*CLI, *arguments, *(part for setting in chosen for part in ("--set", setting))]

    def rlhf(self, *arguments: str, settings: Sequence[str] = ()) -> str:
        """Run to the end; its output."""
        done = subprocess.run(
            self.command(*arguments, settings=settings),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    def start(self, *arguments: str, settings: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start and go on; the output is in ``log``."""
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                self.command(*arguments, settings=settings),
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        """What the command wrote that was started last."""
        return (self.folder / "log").read_text(errors="replace")

    def iteration(self, run: str, number: int) -> Path:
        """Folder of an iteration in the store."""
        return self.folder / f".rlhf/store/runs/{run}/iterations/{number:06d}"

    def weights(self, run: str) -> list[str]:
        """Digest of the weights after every iteration."""
        done = sorted(self.folder.glob(f".rlhf/store/runs/{run}/iterations/*/DONE.json"))
        return [json.loads(path.read_text())["weights_digest"] for path in done]

    def disturbed(self, run: str, moment: Callable[[], bool], blow: Callable[[], None], **more: Any) -> None:
        """Train to the end, with one blow at a moment."""
        driver = self.start("train", "one-gpu", "--run", run, **more)
        try:
            wait(lambda: moment() or driver.poll() is not None)
            blow()
            assert driver.wait(600) == 0, self.log[-6000:]
        finally:
            driver.kill()

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


def kill(name: str) -> None:
    """kill -9 of every actor of this class."""
    found = actors(name)
    assert found
    for process in found:
        process.kill()


@pytest.fixture(scope="module")
def calm(home) -> list[str]:
    """Weights of the run that nobody disturbs."""
    home.rlhf("train", "one-gpu", "--run", "calm")
    return home.weights("calm")


@pytest.fixture(scope="module")
def calm_pair(home) -> list[str]:
    """The same with two ranks and two engines."""
    home.rlhf("train", "one-gpu", "--run", "pair", settings=TWO)
    return home.weights("pair")


def test_a_run_on_shared_gpus(home, calm):
    view = json.loads(home.rlhf("show", "calm", "--json"))
    assert view["state"] == "complete"
    for row in view["iterations"]:
        assert row["metrics"]["sync/probe_gap"] < 0.15
        assert row["metrics"]["mismatch/log_ratio_abs"] < 0.15
    assert len(set(calm)) == 5
    assert home.proven("calm")
    (record,) = home.folder.glob(".rlhf/store/runs/calm/environments/*.json")
    assert json.loads(record.read_text())["exact"]


def test_a_rank_that_dies_without_checkpoints(home, calm):
    commit = home.iteration("rank", 3) / "commits/score.json"
    home.disturbed("rank", commit.exists, lambda: kill("TrainerActor"))
    assert "replayed the update of iteration 2" in home.log
    assert home.weights("rank") == calm
    assert home.proven("rank")


def test_a_driver_that_dies_in_an_update(home, calm):
    driver = home.start("train", "one-gpu", "--run", "driver")
    commit = home.iteration("driver", 2) / "commits/advantages.json"
    try:
        wait(lambda: commit.exists() or driver.poll() is not None)
        driver.send_signal(signal.SIGKILL)
        driver.wait(30)
    finally:
        driver.kill()
    before = commit.read_bytes()
    home.rlhf("resume", "driver")
    assert commit.read_bytes() == before
    assert home.weights("driver") == calm
    assert home.proven("driver")


def test_an_engine_that_dies_while_it_generates(home, calm):
    data = home.iteration("engine", 2) / "data/generate"
    home.disturbed("engine", lambda: any(data.rglob("*.arrow")), lambda: kill("RolloutActor"))
    assert home.weights("engine") == calm
    assert home.proven("engine")


def test_a_run_without_deterministic_kernels_is_never_stuck(home):
    commit = home.iteration("loose", 3) / "commits/score.json"
    settings = ["optim.deterministic=false"]
    home.disturbed("loose", commit.exists, lambda: kill("TrainerActor"), settings=settings)
    assert "this run is not exact here: optim.deterministic = false" in home.log
    assert json.loads(home.rlhf("show", "loose", "--json"))["state"] == "complete"
    assert home.proven("loose")


@pytest.mark.skipif(gpus() < 2, reason="fewer than two CUDA devices")
def test_one_of_two_ranks_dies(home, calm_pair):
    commit = home.iteration("pair-rank", 3) / "commits/score.json"
    home.disturbed("pair-rank", commit.exists, lambda: actors("TrainerActor")[1].kill(), settings=TWO)
    assert "replayed the update of iteration 2" in home.log
    assert home.weights("pair-rank") == calm_pair
    assert home.proven("pair-rank")


@pytest.mark.skipif(gpus() < 2, reason="fewer than two CUDA devices")
def test_two_ranks_become_one(home, calm_pair):
    home.rlhf("rerun", "pair", "--iteration", "4", "--from", "advantages", "--no-train")
    home.rlhf("resume", "pair", "--new-topology", "resources.trainer_ranks=1", "--new-topology", "resources.engines=1")
    assert home.proven("pair")
