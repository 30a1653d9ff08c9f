"""One stack of local services and one S3 server for all end-to-end tests; every run has its own name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.object_store import open_store
from infra.services import ServiceStack
from infra.services.processes import stack_processes
from rlhf_core.config import load_config
from rlhf_core.testing.tiny_model import make_tiny_model
from tests.fixtures.s3_server import S3Server

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures"
RLHF = str(Path(sys.executable).with_name("rlhf"))
#: Iterations of the reference run; what other runs do in an iteration is compared with it.
ITERATIONS = 7
BUCKET = "e2e"

PRESET = """
iterations = {iterations}
[model]
source = "{model}"
dtype = "float32"
[prompts]
heldout = 4
max_prompt_tokens = 64
[generate]
prompts_per_iteration = 2
samples_per_prompt = 4
max_new_tokens = 8
[[reward.functions]]
function = "{fixtures}/e2e_rewards.py:letters"
[optim]
learning_rate = 1e-3
[checkpoint]
every = 0
[resources]
kv_cache_gib = 0.1
"""

#: Prefect's own task run that stands for a subflow in its parent.
SUBFLOW = re.compile(r"iteration-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Variables of the caller that would lead past the stack.
FOREIGN = ("PREFECT_", "RAY_", "RLHF_", "AWS_", "VLLM_")


@dataclass
class World:
    """The folder that commands run in, its services in ``.rlhf``, and ways to ask them."""

    folder: Path
    preset: Path
    stack: ServiceStack
    s3: S3Server
    api_url: str
    services: dict[str, str]
    """Variables that name the services, for programs that cannot find them by the folder."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, **changes: str) -> dict[str, str]:
        """The caller's environment without anything that leads elsewhere, and with the credentials of S3."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        return {**kept, **self.s3.env(), **changes}

    def rlhf(
        self, *arguments: str, timeout: float = 120, cwd: Path | None = None, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end in the folder, or in another one, where ``services`` lead it here."""
        env = self.environment(**changes)
        return subprocess.run(
            [RLHF, *arguments],
            cwd=cwd or self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def train(self, run: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """`rlhf train` of the shared preset to the end; must succeed."""
        done = self.rlhf("train", str(self.preset), "--run", run, *arguments, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *command: str, log: Path, **changes: str) -> subprocess.Popen[bytes]:
        """Start a process of its own in the folder; it is ended with the tests of the module at the latest."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(**changes),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def json(self, *arguments: str) -> Any:
        """Output of a command with ``--json``."""
        done = self.rlhf(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def record(self, key: str, url: str | None = None) -> dict[str, Any]:
        """A JSON object of a store, by default the folder's."""
        return json.loads(open_store(url or str(self.folder / ".rlhf" / "store")).get(key))

    def exists(self, key: str, url: str) -> bool:
        """Whether a store has an object."""
        return open_store(url).exists(key)

    def weights(self, run: str, iteration: int, url: str | None = None) -> str:
        """Digest of the weights that an iteration ended with."""
        return self.record(f"runs/{run}/iterations/{iteration:06d}/DONE.json", url)["weights_digest"]

    def commits(self, run: str, iteration: int) -> dict[str, bytes]:
        """Manifests of the stages that are committed, by stage."""
        folder = self.folder / ".rlhf" / "store" / "runs" / run / "iterations" / f"{iteration:06d}" / "commits"
        return {path.stem: path.read_bytes() for path in folder.glob("*.json")}

    # Prefect, as its UI asks it

    def prefect(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST (GET without a body) to the API."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api_url}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return json.load(answer)

    def prefect_command(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Prefect's own command, on the services."""
        return subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=cwd or self.folder,
            env=self.environment(**self.services),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start_deployed(self, *words: str) -> str:
        """Start a training with the preset and these overrides; id of the flow run."""
        config = load_config(self.preset, ["prompts.heldout=0", *words])
        return self.start_deployment("rlhf-local", config=config.model_dump(mode="json"))

    def start_deployment(self, name: str, **parameters: Any) -> str:
        """Deploy prefect.yaml and start one of its deployments; id of the flow run."""
        done = self.prefect_command("deploy", "--all", cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
        (deployment,) = self.prefect("deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return self.prefect(f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})["id"]

    def flow_runs(self, name: str) -> list[dict[str, Any]]:
        """Flow runs of this name, the newest first."""
        return self.prefect(
            "flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_DESC"}
        )

    def flow_run(self, identity: str) -> dict[str, Any]:
        """A flow run as it is now."""
        return self.prefect(f"flow_runs/{identity}")

    def task_names(self, flow_run: str) -> set[str]:
        """Names of the task runs that a flow run has so far."""
        return {r["name"] for r in self.prefect("task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})}

    def task_states(self, flow_run: str, expected: int) -> dict[str, str]:
        """Task run name -> name of its state, once ``expected`` runs of the flow run are final; they arrive late."""
        body = {"flow_runs": {"id": {"any_": [flow_run]}}}

        def final() -> dict[str, str] | None:
            rows = [r for r in self.prefect("task_runs/filter", body) if not SUBFLOW.fullmatch(r["name"])]
            ended = {r["name"]: r["state_name"] for r in rows if r["state_type"] not in ("PENDING", "RUNNING")}
            return ended if len(ended) >= expected else None

        return wait_until(final)

    def logs(self, flow_run: str) -> str:
        """What a flow run and its tasks logged."""
        body = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "limit": 200, "sort": "TIMESTAMP_ASC"}
        return "\n".join(row["message"] for row in self.prefect("logs/filter", body))

    def actor_processes(self) -> list[psutil.Process]:
        """Processes of Ray actors of this stack."""
        names = ("ray::RolloutActor", "ray::TrainerActor", "ray::RewardActor")
        found = []
        for process in stack_processes(self.stack.layout.identity):
            try:
                if " ".join(process.cmdline()).startswith(names):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill_actors(self) -> None:
        """SIGKILL for every actor of the stack, and wait until they are gone."""
        processes = self.actor_processes()
        assert len(processes) >= 3
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=30)
        wait_until(lambda: not self.actor_processes())

    def clean_up(self) -> None:
        """End what tests that failed have left: drivers, flow runs of deployments, actors and their places."""
        flows = [process for process in stack_processes(self.stack.layout.identity) if runs_a_flow(process)]
        for process in (*self.started, *flows):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait()
        self.started.clear()
        if self.actor_processes():
            for row in self.json("runs"):
                self.rlhf("gc", row["run"])


def runs_a_flow(process: psutil.Process) -> bool:
    """Whether the worker started it for a flow run."""
    try:
        return "PREFECT__FLOW_RUN_ID" in process.environ()
    except psutil.Error:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a module pays for the runs that all of them look at."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(900))


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, pause: float = 0.1) -> Any:
    """The first true value of the condition; an assertion after the seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"nothing for {seconds} s"
        time.sleep(pause)
    return value


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Function: (condition, seconds, pause) -> the first true value of the condition."""
    return wait_until


@pytest.fixture(scope="session")
def e2e_model(tmp_path_factory, tokenizer_folder) -> Path:
    """Folder of the tiny random model, float32."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tokenizer_folder)


@pytest.fixture(scope="session")
def e2e_preset(e2e_model, tmp_path_factory) -> Path:
    """The preset of the end-to-end runs."""
    path = tmp_path_factory.mktemp("preset") / "tiny.toml"
    path.write_text(PRESET.format(iterations=ITERATIONS, model=e2e_model, fixtures=FIXTURES))
    return path


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> Iterator[S3Server]:
    """A real S3 server on loopback."""
    with S3Server(tmp_path_factory.mktemp("s3"), bucket=BUCKET) as server:
        yield server


@pytest.fixture(scope="module")
def world(whole_world) -> Iterator[World]:
    """The services, up, and free of what other modules did wrong."""
    try:
        yield whole_world
    finally:
        whole_world.clean_up()


@pytest.fixture(scope="session")
def whole_world(e2e_preset, s3) -> Iterator[World]:
    """The services, up. Their folder is short because unix sockets are below it."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-e2e-"))
    stack = ServiceStack(folder / ".rlhf")
    try:
        with pytest.MonkeyPatch.context() as environment:
            for name in [n for n in os.environ if n.startswith(FOREIGN)]:
                environment.delenv(name)
            # Workers, which write to S3 themselves, inherit from the services.
            for name, value in s3.env().items():
                environment.setenv(name, value)
            # Ray counts the memory of the whole machine and would kill actors because of what else runs on it.
            environment.setenv("RAY_memory_monitor_refresh_ms", "0")
            addresses = stack.up(180)
            stack.wait_for_worker(180)
            yield World(folder, e2e_preset, stack, s3, addresses.prefect_api_url, addresses.environment)
    finally:
        stack.down()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Finished:
    """A run that was trained to the end by one command."""

    run: str
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def reference(whole_world) -> Finished:
    """Run ``a``: the shared preset, never interrupted, in the default store."""
    done = whole_world.train("a", timeout=240)
    return Finished("a", done.stdout, done.stderr)
