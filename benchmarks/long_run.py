"""What an iteration costs as a run grows long, and what `rlhf show` costs on a very long one.

    python benchmarks/long_run.py OUT.json [--iterations 2000] [--minutes M] [--shown 10000] [--no-heartbeats]

The flow `train_rlhf` as it is, against a local Prefect server and a local store. Only the actors are stand-ins, in this process:
they write real, tiny shards and make their figures up. So what is measured is the driver, the store and the Prefect server.
An iteration counts from one turn of the driver's loop to the next. Prefect's heartbeats round its seconds up: a flow run ends
only when the thread that sends them wakes up, once a second. `--no-heartbeats` shows the work alone. `--minutes` ends the run
early.

Then a store with ten thousand finished iterations is written, and `rlhf show` and `rlhf runs` read it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from stand_ins import Held, StandIns, start_cluster

from infra.services import Service, ServiceStack
from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.records import canonical, digest

if TYPE_CHECKING:
    from tasks.driver import Driver

RUN = "long"
WINDOWS = (10, 100, 500, 1000, 2000)
CLI = [sys.executable, "-m", "flows.cli"]
MODEL = """
import sys
from rlhf_core.testing.tiny_model import make_tiny_model, tiny_tokenizer_folder
make_tiny_model(sys.argv[1] + "/model", tiny_tokenizer_folder(sys.argv[1] + "/tokenizer"))
"""


#: Together with those of the other stages as many metrics as a real run has.
@dataclass(frozen=True)
class Sample:
    """One iteration, and what there is after it."""

    iteration: int
    seconds: float
    driver_cpu: float
    """CPU seconds of this process in the iteration."""
    server_cpu: float
    """CPU seconds of the Prefect server in the iteration."""
    new_objects: float
    objects: float
    driver_rss: float
    """MiB."""
    server_rss: float
    """MiB."""
    database: float
    """MiB of Prefect's database with its write-ahead log."""
    threads: float
    files: float
    """Open file descriptors of this process."""


class TimeIsUp(Exception):
    """Ends the run where `--minutes` are over."""


class Recorder:
    """Takes a sample at every turn of the driver's loop; what it costs itself is not counted."""

    def __init__(self, home: Path, server: int, deadline: float) -> None:
        self.home, self.deadline = home, deadline
        self.driver, self.server = psutil.Process(), psutil.Process(server)
        self.samples: list[Sample] = []
        self.types: list[tuple[int, Counter[str]]] = []
        self._opened = self._cpu_driver = self._cpu_server = 0.0
        self._objects = self._in_iterations = 0

    def mark(self, iteration: int) -> None:
        """Iteration ``iteration`` begins; the one before is over."""
        now = time.monotonic()
        if iteration:
            self._sample(iteration - 1, now - self._opened)
        if iteration in (60, 200) or iteration % 500 == 0:
            self.look_at_memory(iteration)
        if iteration and iteration % 100 == 0:
            print(self.samples[-1], flush=True)
        if now > self.deadline:
            raise TimeIsUp(f"after iteration {iteration - 1}")
        self._cpu_driver, self._cpu_server = cpu_of(self.driver), cpu_of(self.server)
        self._opened = time.monotonic()

    def look_at_memory(self, iteration: int) -> None:
        """Count the living objects by type."""
        gc.collect()
        self.types.append((iteration, Counter(f"{type(o).__module__}.{type(o).__name__}" for o in gc.get_objects())))

    def _sample(self, iteration: int, seconds: float) -> None:
        run = self.home / "store" / layout.run_root(RUN)
        self._in_iterations += files_below(run / "iterations" / f"{iteration:06d}")
        objects = self._in_iterations + sum(files_below(f) for f in run.iterdir() if f.name != "iterations")
        sample = Sample(
            iteration=iteration,
            seconds=seconds,
            driver_cpu=cpu_of(self.driver) - self._cpu_driver,
            server_cpu=cpu_of(self.server) - self._cpu_server,
            new_objects=objects - self._objects,
            objects=objects,
            driver_rss=self.driver.memory_info().rss / 2**20,
            server_rss=self.server.memory_info().rss / 2**20,
            database=sum(file.stat().st_size for file in (self.home / "prefect").glob("prefect.db*")) / 2**20,
            threads=self.driver.num_threads(),
            files=self.driver.num_fds(),
        )
        self._objects = objects
        self.samples.append(sample)

    def grown_types(self) -> dict[str, list[tuple[int, int]]]:
        """The types of which there are more and more: (iteration, objects) each."""
        if len(self.types) < 3:
            return {}
        first, last = self.types[1][1], self.types[-1][1]
        most = sorted(last, key=lambda name: last[name] - first[name], reverse=True)[:15]
        return {name: [(k, counts[name]) for k, counts in self.types] for name in most}


def cpu_of(process: psutil.Process) -> float:
    """CPU seconds so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def files_below(path: Path) -> int:
    """Files of a folder and the folders in it; a file counts as itself."""
    return 1 if path.is_file() else sum(len(files) for _, _, files in os.walk(path))


def configuration(home: Path, model: Path, iterations: int) -> RunConfig:
    """Small batches, two of everything, all else as it comes."""
    return RunConfig.model_validate(
        {
            "run": RUN,
            "iterations": iterations,
            "model": {"source": str(model), "dtype": "float32"},
            "prompts": {"heldout": 0, "max_prompt_tokens": 64},
            "generate": {"prompts_per_iteration": 4, "samples_per_prompt": 4, "max_new_tokens": 8},
            "evaluation": {"samples_per_prompt": 0},
            "resources": {"trainer_ranks": 2, "engines": 2},
            "storage": {"url": str(home / "store")},
        }
    )


def train(home: Path, arguments: argparse.Namespace) -> Recorder:
    """Run the flow with stand-ins, and watch it."""
    subprocess.run([sys.executable, "-c", MODEL, str(home)], check=True)
    stack = ServiceStack(home)
    addresses = stack.up(services=[Service.PREFECT])
    try:
        os.environ.update(addresses.environment)
        (server,) = [s.pid for s in stack.status().services if s.service is Service.PREFECT]
        # Only now: Prefect reads the environment when it is imported.
        import prefect.flow_engine

        import tasks.driver
        from flows.train_rlhf import train_rlhf
        from tasks.context import StageContext

        if arguments.no_heartbeats:
            prefect.flow_engine._send_heartbeats = nullcontext
        held = Held()
        recorder = Recorder(home, server or 0, time.monotonic() + 60 * arguments.minutes)
        tasks.driver.start_cluster = start_cluster
        tasks.driver.stop_actors = tasks.driver.reconnect = lambda *_: None
        StageContext._group = lambda self, names: StandIns(names, self.store, held)
        tasks.driver.Driver.pending = watched(tasks.driver.Driver.pending, recorder)
        with suppress(TimeIsUp):
            while not train_rlhf(configuration(home, home / "model", arguments.iterations)).finished:
                pass
        recorder.look_at_memory(len(recorder.samples))
        return recorder
    finally:
        stack.down()


def watched(pending: Callable[[Driver], Iterator[int]], recorder: Recorder) -> Callable[[Driver], Iterator[int]]:
    """The driver's loop with a mark at each turn."""

    def loop(self: Driver) -> Iterator[int]:
        for iteration in pending(self):
            recorder.mark(iteration)
            yield iteration

    return loop


def windows_of(samples: Sequence[Sample]) -> dict[int, dict[str, float]]:
    """Medians around some iterations, and around the last ones."""
    count, found = len(samples), {}
    marks = [mark for mark in WINDOWS if mark < 0.9 * count]
    for mark in [*marks, count]:
        half = min(25, max(5, mark // 10))
        last = min(count, mark + half)
        part = samples[max(1, last - 2 * half) : last]  # the first iteration loads what all others have
        found[mark] = {
            f.name: statistics.median(getattr(s, f.name) for s in part) for f in fields(Sample) if f.name != "iteration"
        }
        found[mark]["database, KiB an iteration"] = 1024 * (part[-1].database - part[0].database) / (len(part) - 1)
        found[mark]["driver, KiB an iteration"] = 1024 * (part[-1].driver_rss - part[0].driver_rss) / (len(part) - 1)
    return found


def renumbered(raw: bytes, iteration: int) -> bytes:
    """A record of iteration 1 as one of another iteration, sealed."""
    body = json.loads(raw.replace(b"iterations/000001/", f"iterations/{iteration:06d}/".encode()))
    body["policy_version"] += iteration - 1
    body["iteration"] = iteration
    del body["digest"]
    return canonical({**body, "digest": digest(canonical(body))})


def write_long_store(source: Path, target: Path, iterations: int) -> None:
    """A store whose run has so many finished iterations, each like iteration 1 of the run in ``source``."""
    run = layout.run_root(RUN)
    body = json.loads((source / layout.run_record(RUN)).read_bytes())
    body["config"]["iterations"] = iterations
    del body["digest"]
    put(target / layout.run_record(RUN), canonical({**body, "digest": digest(canonical(body))}))
    begin = source / run / "iterations" / "000001"
    files = {path.relative_to(begin): path.read_bytes() for path in begin.rglob("*") if path.is_file()}
    for k in range(iterations):
        for relative, data in files.items():
            path = target / run / "iterations" / f"{k:06d}" / relative
            put(path, renumbered(data, k) if path.suffix == ".json" else data)


def put(path: Path, data: bytes) -> None:
    """Write a file, without what a store does for its safety."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    path.write_bytes(data)


def command_costs(store: Path, repetitions: int = 3) -> dict[str, dict[str, float]]:
    """Seconds (median) and peak memory (MiB) of the commands that look at runs."""
    commands = {
        "show": ["show", RUN],
        "show --json": ["show", RUN, "--json"],
        "show --all": ["show", RUN, "--all"],
        "runs": ["runs"],
    }
    found = {}
    for name, words in commands.items():
        costs = [cost_of([*CLI, *words, "--store", str(store)]) for _ in range(repetitions)]
        found[name] = {
            "seconds": statistics.median(c[0] for c in costs),
            "cpu": statistics.median(c[1] for c in costs),
            "peak MiB": max(c[2] for c in costs),
        }
    return found


def cost_of(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds, peak memory in MiB."""
    started, peak, ended = time.monotonic(), 0, 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        watched_process = psutil.Process(process.pid)
        while not ended:
            # Not ru_maxrss: a child begins with that of the process that started it.
            peak = max(peak, watched_process.memory_info().rss)
            time.sleep(0.01)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, peak / 2**20


def print_windows(windows: dict[int, dict[str, float]]) -> None:
    """A line a figure, a column a window, and the last one compared with the first."""
    marks = list(windows)
    print(f"{'around iteration':28s}" + "".join(f"{mark:>12d}" for mark in marks) + "  last / first")
    for name in windows[marks[0]]:
        row = [windows[mark][name] for mark in marks]
        ratio = f"{row[-1] / row[0]:12.3f}" if row[0] else f"{'':12s}"
        print(f"{name:28s}" + "".join(f"{value:12.3f}" for value in row) + ratio)


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=24 * 60)
    parser.add_argument("--shown", type=int, default=10_000)
    parser.add_argument("--no-heartbeats", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-long-") as temporary:
        home = Path(temporary)
        recorder = train(home, arguments)
        windows = windows_of(recorder.samples)
        result: dict[str, Any] = {
            "windows": windows,
            "grown types": recorder.grown_types(),
            "samples": [asdict(sample) for sample in recorder.samples],
        }
        arguments.out.write_text(json.dumps(result, indent=1))
        print_windows(windows)
        for name, counts in result["grown types"].items():
            print(f"{name:60s}", *(f"{k}: {count}" for k, count in counts))
        for iterations in (10, arguments.shown):
            store = home / f"shown-{iterations}"
            write_long_store(home / "store", store, iterations)
            result[f"commands, {iterations} iterations"] = command_costs(store)
            print(f"{iterations} iterations, {files_below(store)} objects:")
            for name, costs in result[f"commands, {iterations} iterations"].items():
                print(f"  rlhf {name:14s}", *(f"{what} {value:.2f}" for what, value in costs.items()))
    arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
