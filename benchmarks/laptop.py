"""The laptop preset on this machine: orchestration, generation against bare vLLM, sync, memory, cold start.

    python benchmarks/laptop.py OUT.json [--iterations 6] [--set section.key=value ...]

Runs `rlhf train laptop` in a fresh home and prints medians. Then it runs five iterations beside a second process with bare
`vllm.LLM`: as soon as an iteration has generated, the driver is stopped, and bare vLLM generates the same prompts with the same
sampling. The speed of a machine drifts by more than what is compared, hence these pairs; the learning rate is next to nothing
there, so that both sample the same policy. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

CLI = [sys.executable, "-m", "flows.cli"]

BARE = """
import json, os, sys, time
from rlhf_core.engines.vllm_engine import EngineSettings, engine_environment, to_vllm_args
settings = EngineSettings(**json.loads(sys.stdin.readline()))
os.environ.update(engine_environment(settings))
from vllm import LLM, SamplingParams
args = to_vllm_args(settings)
args.pop("worker_extension_cls")
llm = LLM(**args)
params = SamplingParams(n=8, max_tokens=24, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False)
print("READY", flush=True)
for line in sys.stdin:
    prompts = json.loads(line)
    started = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.monotonic() - started
    tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    print("RESULT", tokens / seconds, flush=True)
    llm.reset_prefix_cache()
"""

#: Iterations of the run beside bare vLLM; the first warms up and does not count.
PAIRS = 5

#: A log line and what to do while the driver is stopped at it: the first group is the iteration.
Pause = tuple[str, Callable[[int], None]]


class Memory(threading.Thread):
    """Largest growth of the machine's memory in use since the start, GiB: all processes, shared pages once.

    Reading every process's proportional set size instead would cost the run CPU time, a second and more a reading.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak, self.done = self._used(), 0.0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.peak = max(self.peak, (self._used() - self.before) / 2**30)

    @staticmethod
    def _used() -> int:
        memory = psutil.virtual_memory()
        return memory.total - memory.available


def train(
    home: Path, name: str, overrides: list[str], log: Path, pause: Pause | None = None
) -> tuple[dict[str, Any], float]:
    """Run the preset; returns what `rlhf show` says and the peak memory."""
    environment = {**psutil.Process().environ(), "RLHF_HOME": str(home)}
    memory = Memory()
    memory.start()
    command = [*CLI, "train", "laptop", "--run", name, "--set", f'storage.url="{home}/store"', *overrides]
    try:
        with log.open("w") as sink:
            driver = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, cwd=home)
            if pause is not None:
                follow(driver, log, *pause)
            if driver.wait():
                raise RuntimeError(f"the run failed: see {log}")
        memory.done.set()
        show = [*CLI, "show", name, "--json", "--store", f"{home}/store"]
        view = json.loads(subprocess.run(show, check=True, capture_output=True, text=True, env=environment).stdout)
    finally:
        subprocess.run([*CLI, "down"], check=True, env=environment)
    return view, memory.peak


def follow(driver: subprocess.Popen, log: Path, mark: str, action: Callable[[int], None]) -> None:
    """Stop the driver at each log line with ``mark``, act, and let it go on; until it ends."""
    with log.open() as lines:
        text = ""
        while driver.poll() is None:
            text += lines.readline()
            if not text.endswith("\n"):
                time.sleep(0.005)
                continue
            found, text = re.search(mark, text), ""
            if found:
                driver.send_signal(signal.SIGSTOP)
                try:
                    action(int(found[1]))
                finally:
                    driver.send_signal(signal.SIGCONT)


def settle(home: Path) -> None:
    """Wait until the processes of the stack below ``home`` compute nothing: a worker may have got its job already."""

    def used() -> float:
        total = 0.0
        for process in psutil.process_iter():
            try:
                if process.environ().get("RLHF_HOME") == str(home):
                    times = process.cpu_times()
                    total += times.user + times.system
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return total

    for _ in range(60):
        before = used()
        time.sleep(0.5)
        if used() - before < 0.15:
            return
    raise RuntimeError("the run's workers do not come to rest while its driver is stopped")


def seconds_between(log: str, first: str, last: str) -> float:
    """Seconds between the lines that contain the two texts."""
    times = {}
    for line in log.splitlines():
        stamp = re.match(r"(\d\d:\d\d:\d\d\.\d+)", line)
        for text in (first, last):
            if stamp and text in line:
                times[text] = datetime.strptime(stamp[1], "%H:%M:%S.%f")
    return (times[last] - times[first]).total_seconds()


def orchestration(view: dict, log: str) -> list[float]:
    """Seconds of each iteration but the first that are no generation, forward, backward, optimizer or sync."""
    found = []
    for row in view["iterations"][1:]:
        k, metrics = row["iteration"], row["metrics"]
        wall = seconds_between(
            log, f"Task run 'iteration-{k - 1:06d}' - Finished", f"Task run 'iteration-{k:06d}' - Finished"
        )
        work = metrics["generate/engine_seconds"] + metrics["advantages/seconds"] + metrics["update/seconds"]
        found.append(wall - work - row["stage_seconds"]["sync"])
    return found


class BareVllm:
    """`vllm.LLM` in a process of its own, loaded and idle between calls."""

    def __init__(self, home: Path) -> None:
        model = next((home / "models").glob("smollm2-*bfloat16"))
        settings = {"model": str(model), "dtype": "bfloat16", "max_model_len": 89, "max_num_seqs": 128}
        with (home / "bare.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._ask(settings | {"kv_cache_gib": 0.3}, "READY")

    def generate(self, prompts: list[list[int]]) -> float:
        """Tokens a second."""
        return float(self._ask(prompts, "RESULT")[1])

    def _ask(self, question: Any, answer: str) -> list[str]:
        print(json.dumps(question), file=self.process.stdin, flush=True)
        for line in self.process.stdout or ():
            if line.startswith(answer):
                return line.split()
        raise RuntimeError(f"bare vLLM ended with {self.process.wait()}: see bare.log")


def against_bare(home: Path, overrides: list[str]) -> tuple[list[float], list[float]]:
    """Tokens a second of a run's iterations, and of bare vLLM on the same prompts right after each."""
    from infra.object_store import open_store
    from rlhf_core.buffer import load_stage, read_rows

    bare, store, found = BareVllm(home), open_store(f"{home}/store"), []

    def generate(iteration: int) -> None:
        settle(home)
        stages = [load_stage(store, "pairs", iteration, "generate")]
        table = read_rows(store, stages, columns=["prompt_ids", "sample"])
        found.append(bare.generate([r["prompt_ids"] for r in table.to_pylist() if r["sample"] == 0]))

    own = ["--set", f"iterations={PAIRS}", "--set", "optim.learning_rate=1e-12"]
    mark = r"Task run 'it0*(\d+)-generate' - Finished"
    view, _ = train(home, "pairs", [*overrides, *own], home / "pairs.log", (mark, generate))
    bare.process.communicate()
    return [row["metrics"]["generate/tokens_per_second"] for row in view["iterations"]], found


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rb-"))
    log = home / "train.log"
    overrides = [part for item in arguments.set for part in ("--set", item)]
    started = datetime.now()
    began = time.monotonic()
    view, peak = train(home, "bench", ["--set", f"iterations={arguments.iterations}", *overrides], log)
    seconds, text = time.monotonic() - began, log.read_text()
    ready = re.search(r"(\d\d:\d\d:\d\d\.\d+).*Task run 'cluster' - Finished", text)
    clock = datetime.strptime(ready[1], "%H:%M:%S.%f").replace(year=started.year, month=started.month, day=started.day)
    ours, bare = against_bare(home, overrides)
    result = {
        "cold start to engines ready, s": (clock - started).total_seconds(),
        "orchestration an iteration, s": statistics.median(orchestration(view, text)),
        "generate tokens/s": statistics.median(r["metrics"]["generate/tokens_per_second"] for r in view["iterations"]),
        "pairs: generate tokens/s": statistics.median(ours[1:]),
        "pairs: bare vLLM tokens/s": statistics.median(bare[1:]),
        "pairs: generate / bare": statistics.median(a / b for a, b in zip(ours[1:], bare[1:], strict=True)),
        "sync push, s": statistics.median(r["metrics"]["sync/push_seconds"] for r in view["iterations"]),
        "sync stage with probe, s": statistics.median(r["stage_seconds"]["sync"] for r in view["iterations"]),
        "advantages, s": statistics.median(r["stage_seconds"]["advantages"] for r in view["iterations"]),
        "update, s": statistics.median(r["stage_seconds"]["update"] for r in view["iterations"]),
        "iteration, s": statistics.median(sum(r["stage_seconds"].values()) for r in view["iterations"]),
        "peak memory, GiB": peak,
        "all, s": seconds,
    }
    for name, value in result.items():
        print(f"{name:32s} {value:10.3f}")
    arguments.out.write_text(json.dumps({"result": result, "ours": ours, "bare": bare, "view": view}, indent=1))


if __name__ == "__main__":
    main()
