"""The laptop preset on this machine: orchestration, generation against bare vLLM, sync, memory, cold start.

    python benchmarks/laptop.py OUT.json [--iterations 6] [--set section.key=value ...]

Runs `rlhf train laptop` in a fresh home, then bare `vllm.LLM.generate` on the prompts of its first iterations with the same
sampling, and prints medians. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

import psutil

CLI = [sys.executable, "-m", "flows.cli"]

BARE = """
import json, sys, time
from rlhf_core.engines.vllm_engine import EngineSettings, engine_environment, to_vllm_args
import os
job = json.loads(sys.stdin.read())
settings = EngineSettings(**job["settings"])
os.environ.update(engine_environment(settings))
from vllm import LLM, SamplingParams
args = to_vllm_args(settings)
args.pop("worker_extension_cls")
llm = LLM(**args)
params = SamplingParams(n=8, max_tokens=24, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False)
for prompts in job["prompts"]:
    started = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.monotonic() - started
    tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    print("RESULT", tokens, seconds, flush=True)
"""


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


def train(home: Path, name: str, overrides: list[str], log: Path) -> tuple[dict, float]:
    """Run the preset; returns what `rlhf show` says and the peak memory."""
    environment = {**psutil.Process().environ(), "RLHF_HOME": str(home)}
    memory = Memory()
    memory.start()
    with log.open("w") as sink:
        command = [*CLI, "train", "laptop", "--run", name, "--set", f'storage.url="{home}/store"', *overrides]
        subprocess.run(command, check=True, env=environment, stdout=sink, stderr=subprocess.STDOUT, cwd=home)
    memory.done.set()
    show = [*CLI, "show", name, "--json", "--store", f"{home}/store"]
    view = json.loads(subprocess.run(show, check=True, capture_output=True, text=True, env=environment).stdout)
    subprocess.run([*CLI, "down"], check=True, env=environment)
    return view, memory.peak


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


def bare_vllm(home: Path, name: str, iterations: int) -> list[float]:
    """Tokens a second of bare vLLM on the prompts of the first iterations."""
    from infra.object_store import open_store
    from rlhf_core.buffer import load_stage, read_rows

    store = open_store(f"{home}/store")
    prompts = []
    for k in range(iterations):
        table = read_rows(store, [load_stage(store, name, k, "generate")], columns=["prompt_ids", "sample"])
        prompts.append([r["prompt_ids"] for r in table.to_pylist() if r["sample"] == 0])
    model = next((home / "models").glob("smollm2-*bfloat16"))
    settings = {"model": str(model), "dtype": "bfloat16", "max_model_len": 89, "max_num_seqs": 128, "kv_cache_gib": 0.3}
    job = json.dumps({"settings": settings, "prompts": prompts})
    answer = subprocess.run([sys.executable, "-c", BARE], input=job, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in answer.splitlines() if line.startswith("RESULT")]
    return [int(tokens) / float(seconds) for _, tokens, seconds in lines]


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
    ours = [row["metrics"]["generate/tokens_per_second"] for row in view["iterations"]]
    measured = min(arguments.iterations, 6)  # later answers are shorter: compare the same stretch
    bare = bare_vllm(home, "bench", measured)
    ours = ours[:measured]
    result = {
        "cold start to engines ready, s": (clock - started).total_seconds(),
        "orchestration an iteration, s": statistics.median(orchestration(view, text)),
        "generate tokens/s": statistics.median(ours[1:]),
        "bare vLLM tokens/s": statistics.median(bare[1:]),
        "generate / bare": statistics.median(ours[1:]) / statistics.median(bare[1:]),
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
