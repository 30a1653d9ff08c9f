"""The local services for real: Prefect server, Ray head, worker and supervisor as processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.services import Service, ServiceError, ServiceStack
from infra.services.processes import stack_processes
from tests.fixtures.processes import ending

REPOSITORY = Path(__file__).parents[2]

DRIVER = """
import os, subprocess, sys, ray
ray.init(namespace="test", log_to_driver=False)

@ray.remote(num_cpus=0)
class Holder:
    def start_child(self):
        # Leaves the actor's session and would outlive it, like a launcher does.
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid

holder = Holder.options(name="holder", lifetime="detached").remote()
print(ray.get(holder.start_child.remote()), os.environ["RAY_ADDRESS"])
"""


@contextmanager
def temporary_stack(home: Path):
    stack = ServiceStack(home, object_store_memory=100 << 20)
    try:
        yield stack
    finally:
        stack.down()
        if stack.layout.short_folder != home:
            shutil.rmtree(stack.layout.short_folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    # Odd characters and a path that is too long for sockets.
    home = tmp_path_factory.mktemp("it's 50% of a long path") / ".rlhf"
    with temporary_stack(home) as stack:
        stack.up()
        yield stack


def pid_of(stack: ServiceStack, service: Service) -> int:
    return next(row.pid for row in stack.status().services if row.service is service)


def wait_until(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_driver(environment: dict[str, str]) -> list[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PREFECT_"))}
    command = [sys.executable, "-c", DRIVER]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_services_answer_and_calls_are_idempotent(stack):
    status = stack.status()
    pids = [pid_of(stack, service) for service in (Service.PREFECT, Service.RAY)]
    assert all(row.healthy for row in status.services if row.service is not Service.WORKER)
    with ThreadPoolExecutor(3) as pool:  # as three commands at once
        addresses = list(pool.map(lambda _: ServiceStack(stack.layout.home).up(), range(3)))
    assert addresses == [stack.up()] * 3
    assert [pid_of(stack, service) for service in (Service.PREFECT, Service.RAY)] == pids
    with urllib.request.urlopen(f"{addresses[0].prefect_api_url}/admin/settings", timeout=10) as answer:
        settings = json.load(answer)["server"]
    assert settings["analytics_enabled"] is False
    assert settings["concurrency"]["lease_storage"].endswith(".filesystem")
    assert settings["services"]["task_run_recorder"]["batch_size"] == 200
    with urllib.request.urlopen(addresses[0].ui_url, timeout=10) as answer:
        assert b"<html" in answer.read()


def test_only_loopback_is_listened_on_and_files_are_private(stack):
    listening = [
        connection.laddr.ip
        for process in stack_processes(stack.layout.identity)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 3
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert stack.layout.home.stat().st_mode & 0o077 == 0
    assert stack.layout.short_folder.stat().st_mode & 0o077 == 0
    assert stack.layout.token_file.stat().st_mode & 0o077 == 0


def test_ray_refuses_a_driver_without_the_token(stack):
    environment = {**os.environ, **stack.up().environment, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", "import ray; ray.init()"]
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    with ending(driver):
        refused = any("InvalidAuthToken" in line for line in driver.stderr)  # it tries again and again
    assert refused


def test_killed_server_is_restarted_at_the_same_address(stack):
    addresses = stack.up()
    killed = pid_of(stack, Service.PREFECT)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: pid_of(stack, Service.PREFECT) not in (None, killed))
    assert stack.up() == addresses  # waits for the health of the new one
    assert stack.status().services[0].healthy


def test_worker_takes_part(stack):
    url = f"{stack.up().prefect_api_url}/work_pools/rlhf-local"

    def pool_exists() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["type"] == "process"
        except urllib.error.HTTPError as error:
            error.close()
            return False

    wait_until(pool_exists)


@pytest.mark.skipif(not (REPOSITORY / "flows" / "train_rlhf.py").exists(), reason="the flow is not written yet")
def test_prefect_yaml_deploys_unattended(stack):
    addresses = stack.up()
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    environment = {**os.environ, **addresses.environment}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    request = urllib.request.Request(
        f"{addresses.prefect_api_url}/deployments/filter", b"{}", {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        deployments = {deployment["name"]: deployment for deployment in json.load(answer)}
    assert {name: deployment["entrypoint"] for name, deployment in deployments.items()} == {
        "rlhf-local": "flows.train_rlhf.train_rlhf",
        "rerun-local": "flows.branches.rerun_rlhf",
        "fork-local": "flows.branches.fork_rlhf",
    }
    for deployment in deployments.values():
        assert deployment["work_pool_name"] == "rlhf-local"
        assert deployment["enforce_parameter_schema"] is True
        assert deployment["global_concurrency_limit"]["limit"] == 1
        assert deployment["concurrency_options"]["collision_strategy"] == "ENQUEUE"
        assert deployment["job_variables"]["env"] == {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60"}
    assert [(s["slug"], s["active"]) for s in deployments["rlhf-local"]["schedules"]] == [("nightly", False)]
    stages = deployments["rerun-local"]["parameter_openapi_schema"]["properties"]["from_stage"]["enum"]
    assert stages == ["generate", "score", "advantages", "update", "sync"]


def test_down_leaves_no_process_even_after_the_supervisor_was_killed(stack):
    addresses = stack.up()
    child, address = run_driver(addresses.environment)
    assert address == addresses.ray_address
    assert alive(int(child))
    supervisor = psutil.Process(pid_of(stack, Service.PREFECT)).ppid()
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not alive(supervisor))
    assert len(stack_processes(stack.layout.identity)) > 5

    stack.down()

    assert stack_processes(stack.layout.identity) == []
    assert not alive(int(child))
    assert not stack.status().running
    stack.down()  # nothing to do


def test_a_service_that_cannot_start_is_named_with_its_log(tmp_path):
    with temporary_stack(tmp_path / ".rlhf") as stack:
        stack.layout.create()
        (stack.layout.prefect_home / "prefect.db").write_text("this is not a database " * 100)
        with pytest.raises(ServiceError, match="Prefect server ended while it started") as failure:
            stack.up(services=[Service.PREFECT])
        assert "file is not a database" in str(failure.value)
        assert str(stack.layout.log(Service.PREFECT)) in str(failure.value)
        assert stack_processes(stack.layout.identity) == []
        with pytest.raises(ValueError, match="needs the local Prefect server"):
            stack.up(services=[Service.WORKER])
