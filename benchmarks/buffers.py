"""The rollout buffer against a local S3 server: latency and cost of streamed commits, throughput against bare pyarrow.

    python benchmarks/buffers.py OUT.json [--rollouts 100000] [--tokens 1000] [--repetitions 3] [--seconds 10]

* latency: seconds from the moment the engine hands a group over until its segment is in the store. Once with an engine that
  only keeps the pace, once with one that uses its core.
* overhead: `RolloutActor.generate` with an engine that burns a fixed amount of CPU work, until everything is durable, against
  the same engine whose groups are kept in memory. The two alternate.
* throughput: shards of 1,000 rollouts through StageWriter and read_rows, against pyarrow alone with one file a shard. The two
  alternate in blocks, so that what else the machine does hits both.

Client and server share the machine: the figures compare, they are no forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.fs
import pyarrow.ipc as ipc

from infra.object_store import open_store
from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.jobs import GenerateJob, StageResult
from rlhf_core.actors.one_thread import on_one_thread
from rlhf_core.actors.rollout_actor import RolloutActor, Staging
from rlhf_core.arrays import ragged
from rlhf_core.buffer import StageWriter, commit_stage, read_rows
from rlhf_core.engines.vllm_engine import FinishedGroup, Sampling
from rlhf_core.manifests import Shard, StageManifest
from rlhf_core.prompts.table import write_prompts
from rlhf_core.schema import ROLLOUTS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

from s3_server import S3Server

SAMPLES = 8
VOCABULARY = 49_152
PROMPT_TOKENS = 100
SHARD_ROWS = 1_000
BLOCKS = 10
FLUSH_SECONDS = 1.0
PATIENCE_SECONDS = 900.0
BUCKET = "buffers"


class StandInEngine:
    """Yields ready-made groups after the pace or the work of each; ``handed_over[group]`` is when, ``cpu`` its thread's seconds."""

    def __init__(self, groups: Sequence[FinishedGroup]) -> None:
        self.groups, self.before_each, self.cpu = groups, lambda n: None, 0.0
        self.handed_over: dict[int, float] = {}

    def keep_pace(self, seconds: float) -> None:
        """One group after the other, evenly, ``seconds`` in all; in between the thread sleeps."""
        started, step = time.monotonic(), seconds / len(self.groups)
        self.before_each = lambda n: time.sleep(max(0.0, started + (n + 1) * step - time.monotonic()))

    def burn(self, units: int) -> None:
        """``units`` of CPU work before each group."""
        self.before_each = lambda n: work(units)

    def generate(self, prompts: object, sampling: object, version: int, seed: object) -> Iterator[FinishedGroup]:
        started = time.thread_time()
        for n, group in enumerate(self.groups):
            self.before_each(n)
            self.handed_over[group.index] = time.monotonic()
            yield group
        self.cpu = time.thread_time() - started


@on_one_thread
class StandInActor(RolloutActor):
    """The actor without vLLM."""

    def __init__(self, engine: StandInEngine, store: object, folder: Path) -> None:
        Fenced.__init__(self, "engine-0")
        self.engine, self.store, self._prompts = engine, store, {}
        self.staging = Staging(folder / "segments", 1 << 30, FLUSH_SECONDS)


class NotingStore:
    """The store, noting when a put returned."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.durable: dict[str, float] = {}

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)
        self.durable[key] = time.monotonic()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def work(units: int) -> None:
    """A mix as in an engine's host loop: Python objects and small arrays."""
    for unit in range(units):
        table = {n: (n, str(n)) for n in range(200)}
        array = np.arange(2_000, dtype=np.float32) + len(table) + unit
        np.argsort(np.exp(-array))


def units_for(seconds: float) -> int:
    """Units of work that take so much CPU time here."""
    count = 200
    work(count)
    started = time.thread_time()
    work(count)
    return max(1, round(seconds * count / (time.thread_time() - started)))


def finished_groups(count: int, tokens: int) -> list[FinishedGroup]:
    """Groups of random tokens, as the engine hands them over."""
    chance = np.random.default_rng(0)
    return [
        FinishedGroup(
            index,
            chance.integers(0, VOCABULARY, (SAMPLES, tokens)).tolist(),
            (-chance.exponential(1.0, (SAMPLES, tokens))).tolist(),
            ["length"] * SAMPLES,
            1.0,
        )
        for index in range(count)
    ]


def generate_job(store: object, groups: int, tokens: int) -> GenerateJob:
    """The job of all groups; the prompts are in the store."""
    chance = np.random.default_rng(1)
    table = pa.table(
        {
            "prompt_id": [f"p{n:04d}" for n in range(groups)],
            "prompt_text": ["text"] * groups,
            "prompt_ids": pa.array(
                chance.integers(0, VOCABULARY, (groups, PROMPT_TOKENS)).tolist(), pa.list_(pa.int32())
            ),
            "answer": ["1"] * groups,
            "metadata": [""] * groups,
        }
    )
    numbers = tuple(range(groups))
    return GenerateJob(
        run="bench",
        iteration=0,
        attempt="a",
        prompts=write_prompts(store, "bench", "train", table),
        prompt_rows=numbers,
        groups=numbers,
        sampling=Sampling(SAMPLES, tokens, 1.0),
        version=0,
        seed=0,
        identity="0" * 64,
    )


class Streaming:
    """Latency and overhead of the streamed generate stage."""

    def __init__(self, url: str, folder: Path, groups: int, tokens: int) -> None:
        self.engine = StandInEngine(finished_groups(groups, tokens))
        self.store = NotingStore(open_store(url, PATIENCE_SECONDS))
        self.actor = StandInActor(self.engine, self.store, folder)
        self.job = generate_job(self.store, groups, tokens)
        self._attempts = 0

    def stream(self) -> StageResult:
        """One generate call under an attempt of its own."""
        self._attempts += 1
        return self.actor.generate(0, replace(self.job, attempt=f"a{self._attempts}"))

    def keep(self) -> list[FinishedGroup]:
        """The same groups, kept in memory."""
        return list(self.engine.generate(None, None, 0, 0))

    def latencies(self, result: StageResult) -> list[float]:
        """Seconds until each group was durable."""
        return [
            self.store.durable[shard.key] - self.engine.handed_over[group]
            for shard in result.shards
            for group in shard.groups
        ]


def measure_latency(bench: Streaming, seconds: float, repetitions: int) -> dict[str, object]:
    """Groups at an even pace; the engine's thread sleeps."""
    found, segments = [], []
    for _ in range(repetitions):
        bench.engine.keep_pace(seconds)
        result = bench.stream()
        found.append(bench.latencies(result))
        segments.append(len(result.shards))
    return {**latency_figures(found), "segments": segments}


def latency_figures(found: list[list[float]]) -> dict[str, object]:
    """Median over all groups of all repetitions, and the largest."""
    every = [seconds for part in found for seconds in part]
    return {
        "median": statistics.median(every),
        "max": max(every),
        "max of each": [max(part) for part in found],
        "median of each": [statistics.median(part) for part in found],
    }


def measure_overhead(bench: Streaming, seconds: float, repetitions: int) -> dict[str, object]:
    """The same CPU work with the stream and without, in turns; wall and CPU seconds.

    On a machine that others use too, both scatter by more than what is asked for. The CPU seconds of the stream's own threads
    do not; what they leave out is the wait for the last segment, ``flush seconds``.
    """
    bench.engine.burn(units_for(seconds / len(bench.engine.groups)))
    walls: dict[str, list[float]] = {"stream": [], "memory": []}
    cpus: dict[str, list[float]] = {"stream": [], "memory": []}
    latencies, flushes, others = [], [], []
    calls: dict[str, Callable[[], object]] = {"stream": bench.stream, "memory": bench.keep}
    for repetition in range(repetitions):
        for name in ("stream", "memory") if repetition % 2 else ("memory", "stream"):
            cpu, wall = time.process_time(), time.monotonic()
            result = calls[name]()
            walls[name].append(time.monotonic() - wall)
            cpus[name].append(time.process_time() - cpu)
            if name == "stream":
                others.append(cpus[name][-1] - bench.engine.cpu)
                latencies.append(bench.latencies(result))
                flushes.append(result.metrics["generate/flush_seconds"].value)
    wall = {name: statistics.median(values) for name, values in walls.items()}
    cpu = {name: statistics.median(values) for name, values in cpus.items()}
    pairs = [s / m - 1 for s, m in zip(walls["stream"], walls["memory"], strict=True)]
    return {
        "wall": wall,
        "overhead": wall["stream"] / wall["memory"] - 1,
        "overhead of each pair": pairs,
        "flush seconds": flushes,
        "cpu": cpu,
        "cpu of the stream's threads": others,
        "cpu of the stream's threads / engine": statistics.median(others) / cpu["memory"],
        "walls": walls,
        "cpus": cpus,
        "latency, busy engine": latency_figures(latencies),
    }


class Tables:
    """Tables of the rollout schema that share one set of random arrays and differ in their ids."""

    def __init__(self, rows: int, tokens: int) -> None:
        chance, count = np.random.default_rng(2), rows * tokens
        lengths = np.full(rows, tokens)
        self.rows = rows
        self.lists = {
            "prompt_ids": ragged(
                chance.integers(0, VOCABULARY, rows * PROMPT_TOKENS, dtype=np.int32), np.full(rows, PROMPT_TOKENS)
            ),
            "response_ids": ragged(chance.integers(0, VOCABULARY, count, dtype=np.int32), lengths),
            "logprobs": ragged(-chance.exponential(1.0, count).astype(np.float32), lengths),
        }

    def at(self, first: int) -> pa.Table:
        """The rows ``first ..``."""
        numbers = range(first, first + self.rows)
        columns = {
            "sample_id": [f"000000-{n // SAMPLES:05d}-{n % SAMPLES:03d}" for n in numbers],
            "prompt_id": [f"p{n // SAMPLES:05d}" for n in numbers],
            "group": [n // SAMPLES for n in numbers],
            "sample": [n % SAMPLES for n in numbers],
            **self.lists,
            "policy_version": [0] * self.rows,
            "attempt": ["a"] * self.rows,
            "engine": ["engine-0"] * self.rows,
            "finish_reason": ["length"] * self.rows,
            "seconds": [1.0] * self.rows,
        }
        return pa.table(columns, schema=ROLLOUTS)


class Ours:
    """The product's writer and reader."""

    def __init__(self, store: object, run: str) -> None:
        self.store = store
        self.writer = StageWriter(self.store, run, 0, "generate", "a")
        self.run, self.shards, self.manifest = run, [], None

    def write(self, table: pa.Table, first: int) -> None:
        shard: Shard = self.writer.write_shard(table, first)
        self.shards.append(shard)

    def commit(self) -> None:
        manifest = StageManifest(
            run=self.run, iteration=0, stage="generate", attempt="a", policy_version=0, shards=tuple(self.shards)
        )
        self.manifest, _ = commit_stage(self.store, manifest)

    def read(self, first: int, rows: int) -> pa.Table:
        return read_rows(self.store, [self.manifest], rows=range(first, first + rows))


class Theirs:
    """Bare pyarrow: no digests, no records. Its ranged reads were measured faster than one stream of the whole object."""

    def __init__(self, server: S3Server, folder: str) -> None:
        env = server.env()
        self.fs = pyarrow.fs.S3FileSystem(
            access_key=env["AWS_ACCESS_KEY_ID"],
            secret_key=env["AWS_SECRET_ACCESS_KEY"],
            endpoint_override=server.endpoint.removeprefix("http://"),
            scheme="http",
            region=env["AWS_REGION"],
        )
        self.folder = f"{server.bucket}/{folder}"
        self.options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))

    def write(self, table: pa.Table, first: int) -> None:
        with (
            self.fs.open_output_stream(f"{self.folder}/{first:08d}.arrow") as sink,
            ipc.new_file(sink, table.schema, options=self.options) as writer,
        ):
            writer.write_table(table)

    def read(self, first: int, rows: int) -> pa.Table:
        with self.fs.open_input_file(f"{self.folder}/{first:08d}.arrow") as source:
            return ipc.open_file(source).read_all()


def measure_throughput(server: S3Server, url: str, rollouts: int, tokens: int) -> dict[str, object]:
    """Blocks of a tenth of the rollouts, ours and theirs in turns; first all writes, then all reads."""
    rows = min(SHARD_ROWS, max(1, rollouts // BLOCKS))
    store, tables = open_store(url, PATIENCE_SECONDS), Tables(rows, tokens)
    ours, theirs = Ours(store, "throughput"), Theirs(server, "bare")
    warm_up(Ours(store, "warm-up"), theirs, tables)
    starts = range(0, rollouts, rows)
    blocks = [starts[n : n + len(starts) // BLOCKS] for n in range(0, len(starts), len(starts) // BLOCKS)]
    seconds: dict[str, list[float]] = {name: [] for name in ("write ours", "write theirs", "read ours", "read theirs")}
    for number, block in enumerate(blocks):
        ready = [(tables.at(first), first) for first in block]
        for who, name in in_turns(number, (ours, "write ours"), (theirs, "write theirs")):
            seconds[name].append(timed(lambda who=who, ready=ready: [who.write(*item) for item in ready]))
    commit = timed(ours.commit)
    for number, block in enumerate(blocks):
        for read, name in in_turns(number, (ours.read, "read ours"), (theirs.read, "read theirs")):
            seconds[name].append(timed(lambda read=read, block=block: [read(first, rows) for first in block]))
    same = all(theirs.read(first, rows).equals(ours.read(first, rows)) for first in (starts[0], starts[-1]))
    size = sum(shard.bytes for shard in ours.shards)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    total = {name: sum(values) for name, values in seconds.items()}
    return {
        "rollouts": rollouts,
        "tokens": tokens,
        "stored MiB": size / 2**20,
        "write, ours / theirs": median["write theirs"] / median["write ours"],
        "read, ours / theirs": median["read theirs"] / median["read ours"],
        "write, ours / theirs, totals": total["write theirs"] / (total["write ours"] + commit),
        "read, ours / theirs, totals": total["read theirs"] / total["read ours"],
        "MiB/s": {name: size / 2**20 / value for name, value in total.items()},
        "rollouts/s": {name: rollouts / value for name, value in total.items()},
        "commit seconds": commit,
        "same tables": same,
        "seconds of each block": seconds,
    }


def in_turns(number: int, *items: tuple) -> Iterator[tuple]:
    """Another one begins every time."""
    for place in range(len(items)):
        yield items[(number + place) % len(items)]


def timed(call: Callable[[], object]) -> float:
    """Wall seconds."""
    started = time.monotonic()
    call()
    return time.monotonic() - started


def warm_up(ours: Ours, theirs: Theirs, tables: Tables) -> None:
    """Open the connections and load the libraries of both sides."""
    for who in (ours, theirs):
        who.write(tables.at(0), 0)
    ours.commit()
    for who in (ours, theirs):
        who.read(0, tables.rows)


def print_figures(result: dict) -> None:
    """The asked figures, one a line."""
    latency, overhead = result["latency"], result["overhead"]
    busy, throughput = overhead["latency, busy engine"], result["throughput"]
    lines = {
        "group durable, median, s": latency["median"],
        "group durable, max, s (asked: 3)": latency["max"],
        "the same, busy engine, median": busy["median"],
        "the same, busy engine, max": busy["max"],
        "overhead, wall (asked: 0.02)": overhead["overhead"],
        "CPU of stream's threads / engine": overhead["cpu of the stream's threads / engine"],
        "write, ours / pyarrow (0.5)": throughput["write, ours / theirs"],
        "read, ours / pyarrow (0.5)": throughput["read, ours / theirs"],
        **{f"{name}, MiB/s": value for name, value in throughput["MiB/s"].items()},
    }
    for name, value in lines.items():
        print(f"{name:36s} {value:10.4f}")


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rollouts", type=int, default=100_000, help="of the throughput")
    parser.add_argument("--tokens", type=int, default=1_000, help="a rollout of the throughput")
    parser.add_argument("--groups", type=int, default=64, help="of 8 rollouts, of latency and overhead")
    parser.add_argument("--group-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one streamed generation")
    parser.add_argument("--repetitions", type=int, default=3, help="of latency; the overhead has twice as many")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-buffers-") as folder, S3Server(Path(folder) / "s3", BUCKET) as server:
        os.environ.update(server.env())
        url = f"s3://{BUCKET}/bench"
        bench = Streaming(url, Path(folder), arguments.groups, arguments.group_tokens)
        bench.engine.keep_pace(1.0)
        bench.stream()
        load = psutil.getloadavg()
        result = {
            "latency": measure_latency(bench, arguments.seconds, arguments.repetitions),
            "overhead": measure_overhead(bench, arguments.seconds, 2 * arguments.repetitions),
            "throughput": measure_throughput(server, url, arguments.rollouts, arguments.tokens),
            "load average": [load, psutil.getloadavg()],
            "pyarrow": pa.__version__,
        }
    print_figures(result)
    arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
