"""Run a preset and print its phases: generate, update, sync, sleep and wake, the rest, and memory.

    python benchmarks/one_gpu.py PRESET OUT.json [--run NAME] [--set section.key=value ...]

Works on a CPU as well. Medians leave the first iteration out: it warms kernels and allocators up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

CLI = [sys.executable, "-m", "flows.cli"]


class MemoryWatch(threading.Thread):
    """Largest GPU memory in use, MiB, as nvidia-smi sees it; 0 without one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.process: subprocess.Popen | None = None

    def run(self) -> None:
        # One process that repeats: starting one for every reading would itself slow the driver down.
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=500"]
        if shutil.which(command[0]) is None:
            return
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout or ():
            self.peak = max(self.peak, int(line))

    def stop(self) -> None:
        """End the reading."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def phases(view: dict) -> dict[str, list[float]]:
    """Seconds of each phase, an entry an iteration."""
    rows: dict[str, list[float]] = {}
    for iteration in view["iterations"]:
        metrics, seconds = iteration["metrics"], iteration["stage_seconds"]
        row = {
            "generate (engine)": metrics["generate/engine_seconds"],
            "generate (stage)": seconds["generate"],
            "score": seconds["score"],
            "old logprobs": metrics["advantages/seconds"],
            "update": metrics["update/seconds"],
            "sync (push)": metrics["sync/push_seconds"],
            "sync (stage, with probe)": seconds["sync"],
            "hand-over to trainers": seconds["advantages"] - metrics["advantages/seconds"],
            "sum of stages": sum(seconds.values()),
            "tokens/s": metrics["generate/tokens_per_second"],
            "logprob gap": metrics["mismatch/log_ratio_abs"],
            "probe gap": metrics.get("sync/probe_gap", 0.0),
        }
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    return rows


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", default=f"bench-{int(time.time())}")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    overrides = [part for item in arguments.set for part in ("--set", item)]
    watch, started = MemoryWatch(), time.monotonic()
    watch.start()
    subprocess.run([*CLI, "train", arguments.preset, "--run", arguments.run, *overrides], check=True)
    seconds = time.monotonic() - started
    watch.stop()
    shown = subprocess.run([*CLI, "show", arguments.run, "--json", "--all"], capture_output=True, text=True, check=True)
    view = json.loads(shown.stdout)
    rows = phases(view)
    print(f"{arguments.run}: {seconds:.1f} s in all, GPU peak {watch.peak / 1024:.1f} GiB")
    for name, values in rows.items():
        later = values[1:] or values
        print(f"{name:28s} median {statistics.median(later):10.4f}   all {' '.join(f'{v:.3f}' for v in values)}")
    result = {"run": arguments.run, "seconds": seconds, "gpu_peak_mib": watch.peak, "phases": rows, "view": view}
    arguments.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
