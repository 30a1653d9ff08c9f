"""Talking to the supervisor (supervisord as a private daemon) over its unix socket."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.services.errors import ServiceError
from infra.services.health import last_lines
from infra.services.layout import Layout, Service
from infra.services.programs import GROUP


@dataclass(frozen=True)
class ProgramState:
    """What the supervisor says about a program."""

    state: str
    """STOPPED, STARTING, RUNNING, BACKOFF (died while starting, will be tried again), STOPPING, EXITED or FATAL."""
    pid: int
    """0 when there is no process."""
    reason: str
    """Why it failed; may be empty."""

    @property
    def lives(self) -> bool:
        return self.state in ("STARTING", "RUNNING")

    @property
    def ended(self) -> bool:
        return self.state in ("STOPPED", "EXITED", "FATAL")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        self.sock = connection


class _Transport(xmlrpc.client.Transport):
    """XML-RPC over a unix socket, with a deadline, one connection a call."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__()
        self._path = path
        self._timeout = timeout

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = _Connection(self._path, self._timeout)
        self._connection = (host, connection)  # what close() closes
        return connection


class SupervisorClient:
    """The calls of the supervisor's XML-RPC interface that are needed here. Every error is a ServiceError."""

    def __init__(self, socket_path: Path, timeout: float = 5.0) -> None:
        self._socket_path = socket_path
        self._timeout = timeout

    def answers(self) -> bool:
        """Whether a supervisor listens at the socket and runs."""
        try:
            state = self._call("getState")
        except ServiceError:
            return False
        return bool(state["statename"] == "RUNNING")

    def programs(self) -> dict[Service, ProgramState]:
        rows = self._call("getAllProcessInfo")
        return {
            Service(row["name"]): ProgramState(row["statename"], row["pid"], row["spawnerr"] or row["description"])
            for row in rows
        }

    def start(self, service: Service) -> None:
        """Ask for a start; does not wait. A program that is already started is left alone."""
        try:
            self._call("startProcess", f"{GROUP}:{service.value}", False)
        except _Fault as fault:
            if fault.code != _ALREADY_STARTED:
                raise

    def stop(self, services: list[Service], seconds: float) -> None:
        """Stop programs, all at once, and wait until they ended or the seconds are over."""
        for service in services:
            try:
                self._call("stopProcess", f"{GROUP}:{service.value}", False)
            except _Fault as fault:
                if fault.code != _NOT_RUNNING:
                    raise
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            states = self.programs()
            if all(states[service].ended for service in services):
                return
            time.sleep(0.05)

    def shutdown(self) -> None:
        """Ask the supervisor to stop what is left and to end; does not wait."""
        self._call("shutdown")

    def _call(self, method: str, *arguments: Any) -> Any:
        transport = _Transport(self._socket_path, self._timeout)
        proxy = xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=transport)
        try:
            return getattr(proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            raise _Fault(fault.faultCode, f"the supervisor refused {method}{arguments}: {fault.faultString}") from None
        except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
            raise ServiceError(f"the supervisor at {self._socket_path} gave no valid answer: {error!r}") from error
        finally:
            transport.close()


#: Codes of supervisor.xmlrpc.Faults.
_ALREADY_STARTED = 60
_NOT_RUNNING = 70


class _Fault(ServiceError):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def launch_supervisor(layout: Layout, environment: Mapping[str, str], seconds: float) -> SupervisorClient:
    """Start supervisord as a daemon and wait until it answers. ServiceError with its words if it does not."""
    command = [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", layout.supervisor_config.name]
    log = layout.logs / "supervisord.log"
    try:
        done = subprocess.run(
            command, env=dict(environment), cwd=layout.home, capture_output=True, text=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"the supervisor did not become a daemon within {error.timeout} s; see {log}") from error
    if done.returncode:
        words = (done.stderr + done.stdout).strip()
        raise ServiceError(f"the supervisor did not start (exit status {done.returncode}): {words}")
    client = SupervisorClient(layout.supervisor_socket)
    deadline = time.monotonic() + max(5.0, seconds)
    while not client.answers():
        if time.monotonic() > deadline:
            words = f"The end of its log {log}:\n{last_lines(log)}"
            raise ServiceError(f"the supervisor does not answer at {layout.supervisor_socket}. {words}")
        time.sleep(0.02)
    return client
