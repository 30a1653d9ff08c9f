"""Resuming after a kill in the middle of generation, against a cold start and three updates.

    python benchmarks/resume.py OUT.json [--preset laptop] [--iteration 7] [--every 4] [--set section.key=value ...]

The driver and all actors are killed when iteration K has made its first segment durable, with a checkpoint at K - 3. Then the
documented command is given again, and the time until a new segment appears is compared with the time that the first command
took from its start to its first segment, plus three updates. Batches of 32 prompts, for those of the preset are generated in
one wave, which is over when the first segment is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

CLI = [sys.executable, "-m", "flows.cli"]


def segments(folder: Path, iteration: int) -> int:
    """Durable segments of the iteration."""
    return len(list((folder / f"iterations/{iteration:06d}/data/generate").rglob("*.arrow")))


def wait(condition, seconds: float = 1200.0) -> float:
    """Monotonic time at which the condition became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing for {seconds:.0f} s")
        time.sleep(0.02)
    return time.monotonic()


def kill_actors(home: Path) -> None:
    """SIGKILL for all actors of the services below ``home``."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLHF_HOME") == str(home) and process.cmdline()[0].startswith("ray::"):
                process.kill()
        except (psutil.Error, IndexError):
            continue


def main() -> None:
    """Run, kill, resume, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--iteration", type=int, default=7)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rr-"))
    environment = {**os.environ, "RLHF_HOME": str(home)}
    k, words = arguments.iteration, [part for item in arguments.set for part in ("--set", item)]
    # An evaluation at the start would flatter the comparison: only the cold start has one.
    settings = [f"checkpoint.every={arguments.every}", f"iterations={k + 1}"]
    settings += ["prompts.heldout=0", "generate.prompts_per_iteration=32"]
    settings = [part for item in settings for part in ("--set", item)] + words
    command = [*CLI, "train", arguments.preset, "--run", "r", "--set", f'storage.url="{home}/store"', *settings]
    run = home / "store/runs/r"

    def start() -> tuple[subprocess.Popen, float]:
        log = (home / "log").open("ab")
        return subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log), time.monotonic()

    subprocess.run([*CLI, "up"], env=environment, check=True, capture_output=True)
    driver, began = start()
    cold = wait(lambda: segments(run, 0)) - began
    wait(lambda: segments(run, k))
    driver.send_signal(signal.SIGKILL)
    kill_actors(home)
    driver.wait()
    durable = segments(run, k)
    if (run / f"iterations/{k:06d}/commits/generate.json").exists():
        raise RuntimeError("generation was over before the kill: take more prompts")
    updates = [
        json.loads((run / f"iterations/{j:06d}/commits/update.json").read_text())["metrics"]["update/seconds"]
        for j in range(k - 3, k)
    ]
    driver, began = start()
    resumed = wait(lambda: segments(run, k) > durable) - began
    driver.wait()
    subprocess.run([*CLI, "down"], env=environment, check=True, capture_output=True)
    bound = cold + sum(updates)
    result = {"cold start, s": cold, "three updates, s": sum(updates), "resume, s": resumed, "ratio": resumed / bound}
    for name, value in result.items():
        print(f"{name:20s} {value:8.2f}")
    arguments.out.write_text(json.dumps(result | {"segments before the kill": durable}, indent=1))


if __name__ == "__main__":
    main()
