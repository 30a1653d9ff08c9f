"""`rlhf up` and `rlhf down`: the services of one folder as a whole."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.services.errors import ServiceError
from infra.services.health import accepts_connections, answers_http, last_lines, prefect_answers
from infra.services.layout import Layout, Service
from infra.services.processes import end, stack_processes
from infra.services.programs import LOOPBACK, WORK_POOL, Ports, client_environment, stack_environment, supervisor_config
from infra.services.ray_ready import RayProbe
from infra.services.supervision import ProgramState, SupervisorClient, launch_supervisor
from infra.settings import inherited_environment

#: Bytes of Ray's shared object store. Only manifests and weights in buckets go through it.
OBJECT_STORE_MEMORY = 1 << 30


class StackAddresses(BaseModel):
    """Where the services are. ``environment`` is all that a client process needs."""

    model_config = ConfigDict(frozen=True)

    prefect_api_url: str
    ui_url: str
    ray_address: str
    environment: dict[str, str]


class ServiceStatus(BaseModel):
    """One service as it is now."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    service: Service
    state: str
    """The supervisor's word (RUNNING, STOPPED, ...), or DOWN when there is no supervisor."""
    pid: int | None
    healthy: bool | None
    """Whether it answers; None for the worker, which listens nowhere."""
    log: Path


class StackStatus(BaseModel):
    """The stack as it is now."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    running: bool
    """Whether the supervisor lives."""
    services: tuple[ServiceStatus, ...]


class _State(BaseModel):
    """What `stack.json` keeps. Losing it costs only the ports."""

    ports: Ports
    ray_ready_pid: int = 0
    """The Ray head that a driver has been connected to."""


class ServiceStack:
    """The private services below one folder. Calls from several processes wait for each other.

    Every error is a ServiceError, which names the service, the end of its log and the log's path.
    """

    def __init__(self, home: str | Path, object_store_memory: int = OBJECT_STORE_MEMORY) -> None:
        self.layout = Layout(Path(home).expanduser().resolve())
        self._object_store_memory = object_store_memory

    def up(self, wait_seconds: float = 90.0, services: Sequence[Service] = tuple(Service)) -> StackAddresses:
        """Start what does not run yet, wait until the Prefect API and the Ray cluster answer, and say where they are.

        The worker is started once both answer and is not waited for. ``services`` leaves services out that the caller
        has elsewhere; the worker needs the two others. What a failing call has started it ends again.
        """
        if Service.WORKER in services and not {Service.PREFECT, Service.RAY} <= set(services):
            raise ValueError("the local worker needs the local Prefect server and the local Ray head")
        deadline = time.monotonic() + wait_seconds
        self.layout.create()
        with self._locked(wait_seconds):
            client = SupervisorClient(self.layout.supervisor_socket)
            running = client.answers()
            before = {name for name, program in client.programs().items() if program.lives} if running else set()
            try:
                if not running:
                    client = self._launch(deadline)
                self._bring_up(client, services, deadline)
            except BaseException:  # an interrupted start, too, leaves nothing of its own behind
                if running:
                    client.stop([service for service in services if service not in before], seconds=10.0)
                else:
                    self._end_all(grace_seconds=1.0)
                raise
            return self._addresses(self._load_state().ports)

    def wait_for_worker(self, wait_seconds: float = 60.0) -> None:
        """Wait until the worker's pool is there, which deployments name. ServiceError if it does not come."""
        url = f"{self._addresses(self._load_state().ports).prefect_api_url}/work_pools/{WORK_POOL}"
        deadline = time.monotonic() + wait_seconds
        while not answers_http(url):
            if time.monotonic() > deadline:
                self._fail(Service.WORKER, f"has not made its work pool {WORK_POOL!r} within {wait_seconds:.0f} s")
            time.sleep(0.2)

    def down(self, grace_seconds: float = 3.0) -> None:
        """End every process of this stack and make sure that none is left. Nothing to do is no error."""
        if not self.layout.home.exists():
            return
        with self._locked(60.0):
            self._end_all(grace_seconds)

    def status(self) -> StackStatus:
        """Look, without starting, ending or waiting for anything."""
        client = SupervisorClient(self.layout.supervisor_socket)
        running = client.answers()
        programs = client.programs() if running else {}
        addresses = self._addresses(self._load_state().ports) if running else None
        rows = []
        for service in Service:
            program = programs.get(service, ProgramState("DOWN", 0, ""))
            healthy = addresses is not None and _is_healthy(service, addresses)
            rows.append(
                ServiceStatus(
                    service=service,
                    state=program.state,
                    pid=program.pid or None,
                    healthy=None if service is Service.WORKER else healthy,
                    log=self.layout.log(service),
                )
            )
        return StackStatus(running=running, services=tuple(rows))

    # -- starting

    def _launch(self, deadline: float) -> SupervisorClient:
        # A dead or hanging supervisor leaves services behind that hold the ports and the database.
        self._end_all(grace_seconds=1.0)
        layout = self.layout
        former = self._load_state_or_none()
        ports = Ports.choose(former.ports if former else None)
        if not layout.token_file.exists():
            layout.token_file.touch(mode=0o600)
            layout.token_file.write_text(secrets.token_hex(32), encoding="ascii")
        self._save_state(_State(ports=ports))
        _write(layout.supervisor_config, supervisor_config(layout, ports, self._object_store_memory))
        for session in sorted(layout.ray_folder.glob("session_[0-9]*"))[:-1]:  # the last one's logs may be wanted
            shutil.rmtree(session, ignore_errors=True)
        environment = stack_environment(layout, ports, inherited_environment())
        return launch_supervisor(layout, environment, deadline - time.monotonic())

    def _bring_up(self, client: SupervisorClient, services: Sequence[Service], deadline: float) -> None:
        state = self._load_state()
        addresses = self._addresses(state.ports)
        waiting: list[Service] = [service for service in services if service is not Service.WORKER]
        programs = client.programs()
        started: set[Service] = {service for service in waiting if not programs[service].lives}
        for service in waiting:
            if service in started:
                client.start(service)
        pids: dict[Service, int] = {}
        environment = stack_environment(self.layout, state.ports, inherited_environment())
        with RayProbe(environment, self.layout.logs / "ray-probe.log") as probe:
            while True:
                self._check_alive(client, waiting, started, pids)
                for service in list(waiting):
                    ready = _is_healthy(service, addresses)
                    if ready and service is Service.RAY and state.ray_ready_pid != pids[service]:
                        # The port opens before the node is there: connect once in the life of the process.
                        ready = probe.found_node()
                    if ready:
                        waiting.remove(service)
                if not waiting:
                    break
                if time.monotonic() > deadline:
                    self._fail(waiting[0], "does not answer in time")
                time.sleep(0.1)
        if Service.RAY in pids:
            self._save_state(_State(ports=state.ports, ray_ready_pid=pids[Service.RAY]))
        if Service.WORKER in services and not client.programs()[Service.WORKER].lives:
            client.start(Service.WORKER)

    def _check_alive(
        self, client: SupervisorClient, waiting: Sequence[Service], started: set[Service], pids: dict[Service, int]
    ) -> None:
        """Fail when a service that this call started has ended; the supervisor may restart one that ran before."""
        programs = client.programs()
        for service in waiting:
            program = programs[service]
            ended = not program.lives or pids.get(service, program.pid) != program.pid
            pids[service] = program.pid
            if (ended and service in started) or program.state == "FATAL":
                self._fail(service, f"ended while it started ({program.state}: {program.reason or 'no reason given'})")

    def _fail(self, service: Service, what: str) -> None:
        log = self.layout.log(service)
        raise ServiceError(f"the {service.label} {what}. The end of its log {log}:\n{last_lines(log)}")

    # -- ending

    def _end_all(self, grace_seconds: float) -> None:
        client = SupervisorClient(self.layout.supervisor_socket)
        with suppress(ServiceError):  # what the supervisor cannot do any more is done below
            if client.answers():
                client.stop([Service.WORKER], seconds=10.0)  # it signs off at the server: without one it hangs
                client.stop([Service.PREFECT, Service.RAY], seconds=10.0)
                client.shutdown()
                deadline = time.monotonic() + 5.0
                while client.answers() and time.monotonic() < deadline:
                    time.sleep(0.02)
        # Ray's workers and children of flows may outlive their parents; after a kill of the supervisor everything does.
        alive = end(stack_processes(self.layout.identity), grace_seconds)
        alive += end(stack_processes(self.layout.identity), 0.0)  # what was started while the others ended
        if alive:
            raise ServiceError(f"processes of the local services do not end: {[(p.pid, p.name()) for p in alive]}")
        self.layout.supervisor_socket.unlink(missing_ok=True)

    # -- what is where

    @contextmanager
    def _locked(self, wait_seconds: float) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self.layout.lock_file)
        try:
            lock.acquire(timeout=wait_seconds)
        except Timeout:
            words = f"another `rlhf up` or `rlhf down` has held {self.layout.lock_file} for {wait_seconds:.0f} s"
            raise ServiceError(words) from None
        try:
            yield
        finally:
            lock.release()

    def _addresses(self, ports: Ports) -> StackAddresses:
        server = f"http://{LOOPBACK}:{ports.prefect}"
        return StackAddresses(
            prefect_api_url=f"{server}/api",
            ui_url=server,
            ray_address=f"{LOOPBACK}:{ports.ray}",
            environment=client_environment(self.layout, ports, inherited_environment()),
        )

    def _load_state(self) -> _State:
        state = self._load_state_or_none()
        if state is None:
            raise ServiceError(f"{self.layout.state_file} is missing or damaged: run `rlhf down`, then `rlhf up`")
        return state

    def _load_state_or_none(self) -> _State | None:
        try:
            return _State.model_validate_json(self.layout.state_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def _save_state(self, state: _State) -> None:
        _write(self.layout.state_file, state.model_dump_json())


def _is_healthy(service: Service, addresses: StackAddresses) -> bool:
    if service is Service.PREFECT:
        return prefect_answers(addresses.prefect_api_url)
    return accepts_connections(addresses.ray_address)


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader without the lock sees the old or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
