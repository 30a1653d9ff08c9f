"""What the supervisor runs: the programs, their environment and the supervisor's configuration."""

from __future__ import annotations

import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from infra.services.errors import ServiceError
from infra.services.layout import Layout, Service

LOOPBACK = "127.0.0.1"
WORK_POOL = "rlhf-local"
#: Variable that every process of a stack inherits; its value is the stack's identity.
MARKER = "RLHF_STACK"
#: The programs form one group of the supervisor, because groups are stopped one after the other.
GROUP = "rlhf"
#: Seconds between heartbeats of a flow run. The automation that finds dead runs waits five times as long.
HEARTBEAT_SECONDS = 60
#: Ports below the ephemeral range, so that no outgoing connection takes one between choice and use.
PORT_RANGE = range(20_000, 32_000)

#: Variables that would point the private services at something else.
_FOREIGN = ("PREFECT_", "RAY_ADDRESS", "RAY_AUTH_", "RAY_NAMESPACE", "RAY_RAYLET_", "RAY_JOB_", "SUPERVISOR_")


class Ports(BaseModel):
    """TCP ports on loopback. They are kept between starts, so that the UI keeps its address."""

    model_config = ConfigDict(frozen=True)

    prefect: int
    ray: int
    ray_client: int

    @classmethod
    def choose(cls, former: Ports | None) -> Ports:
        """The former ports where they are still free, else new ones. ServiceError if no port is free."""
        taken: set[int] = set()
        chosen: dict[str, int] = {}
        for name in cls.model_fields:
            port = getattr(former, name) if former else None
            if port is None or port in taken or not _is_free(port):
                port = _free_port(taken)
            taken.add(port)
            chosen[name] = port
        return cls(**chosen)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: a connection in TIME_WAIT is no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _free_port(taken: set[int]) -> int:
    for _ in range(200):
        port = secrets.choice(PORT_RANGE)
        if port not in taken and _is_free(port):
            return port
    raise ServiceError(f"no free TCP port between {PORT_RANGE.start} and {PORT_RANGE.stop} on {LOOPBACK}")


def client_environment(layout: Layout, ports: Ports, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a process talks to the stack's services."""
    return {
        "RLHF_HOME": str(layout.home),
        **prefect_environment(layout, ports),
        **ray_environment(layout, ports),
        "DO_NOT_TRACK": "1",
        **_direct_connections(inherited),
    }


def prefect_environment(layout: Layout, ports: Ports) -> dict[str, str]:
    """Variables of a client of the Prefect server. Its own home keeps the user's profiles out."""
    return {
        "PREFECT_API_URL": f"http://{LOOPBACK}:{ports.prefect}/api",
        "PREFECT_HOME": str(layout.prefect_home),
        # These defaults ignore PREFECT_HOME when it comes from the environment and go to ~/.prefect.
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(layout.prefect_home / "storage"),
        "PREFECT_LOGGING_CONFIG_PATH": str(layout.prefect_home / "logging.yml"),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
    }


def ray_environment(layout: Layout, ports: Ports) -> dict[str, str]:
    """Variables of a driver or node of the Ray cluster."""
    return {
        "RAY_ADDRESS": f"{LOOPBACK}:{ports.ray}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(layout.token_file),
        # Ray replaces 127.0.0.1 by the machine's address and then listens on all interfaces, unless clusters of
        # several nodes are off. This switch is for all systems in spite of its name. Drivers need it as well.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default of 15 would let any other program on this machine starve the training.
        "RAY_worker_niceness": "0",
        # vLLM compares its own idea of the machine's address with Ray's.
        "VLLM_HOST_IP": LOOPBACK,
    }


def _direct_connections(inherited: Mapping[str, str]) -> dict[str, str]:
    """NO_PROXY with the loopback addresses: a company's proxy must not see (and cannot serve) local requests."""
    hosts = [h.strip() for h in (inherited.get("no_proxy") or inherited.get("NO_PROXY") or "").split(",") if h.strip()]
    value = ",".join([*hosts, *(h for h in (LOOPBACK, "localhost") if h not in hosts)])
    return {"NO_PROXY": value, "no_proxy": value}


def server_settings() -> dict[str, str]:
    """The Prefect server's variables from ``infra/deploy/prefect-server.env``."""
    text = (files("infra") / "deploy" / "prefect-server.env").read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}


def stack_environment(layout: Layout, ports: Ports, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the supervisor and so of every service."""
    kept = {key: value for key, value in inherited.items() if not key.startswith(_FOREIGN)}
    return {
        **kept,
        **server_settings(),
        **client_environment(layout, ports, inherited),
        # The server copies its UI to a folder that it can write; the environment may be read-only.
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(layout.prefect_home / "ui"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(layout.prefect_home / "memo_store.toml"),
        # Flow runs of the worker start here (prefect.yaml), so that relative paths mean the same as for `rlhf train`.
        "RLHF_WORKDIR": str(layout.home.parent),
        "PYTHONUNBUFFERED": "1",
        MARKER: layout.identity,
    }


def commands(layout: Layout, ports: Ports, object_store_memory: int) -> dict[Service, list[str]]:
    """Command line of each service. ``object_store_memory`` in bytes."""
    # -P: a folder named ray or prefect below the working directory is not the library.
    prefect = [sys.executable, "-P", "-m", "prefect"]
    return {
        Service.PREFECT: [
            *prefect, "server", "start", "--host", LOOPBACK, "--port", str(ports.prefect), "--analytics-off",
        ],
        Service.RAY: [
            sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block",
            f"--node-ip-address={LOOPBACK}", f"--port={ports.ray}", f"--ray-client-server-port={ports.ray_client}",
            # 0: any free port. The defaults are fixed and collide with a second cluster on the machine.
            "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
            "--include-dashboard=false", "--no-monitor", "--disable-usage-stats",
            f"--object-store-memory={object_store_memory}", f"--temp-dir={layout.ray_folder}",
        ],
        Service.WORKER: [
            *prefect, "worker", "start", "--pool", WORK_POOL, "--type", "process", "--install-policy", "never",
        ],
    }  # fmt: skip


def supervisor_config(layout: Layout, ports: Ports, object_store_memory: int) -> str:
    """The supervisor's configuration file. Programs start when told to and then stay up.

    Paths are relative to the home, the supervisor's working directory: it expands % in some values once and in others
    twice, so that no path with a % could be written down.
    """
    socket_path = layout.supervisor_socket
    socket_text = socket_path.name if socket_path.parent == layout.home else str(socket_path)
    logs = layout.logs.name
    sections = [
        f"""\
[supervisord]
logfile={logs}/supervisord.log
logfile_maxbytes=5MB
logfile_backups=1
pidfile=supervisord.pid
childlogdir={logs}

[unix_http_server]
file={socket_text}
chmod=0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[group:{GROUP}]
programs={",".join(Service)}
"""
    ]
    for service, command in commands(layout, ports, object_store_memory).items():
        # SIGTERM makes `ray start --block` drain its node for 30 s and more. Nothing in the cluster needs that: what
        # counts is committed. When the head is killed, the kernel ends its children, and workers follow their raylet.
        signal = "KILL" if service is Service.RAY else "TERM"
        sections.append(
            f"""\
[program:{service.value}]
command={shlex.join(command).replace("%", "%%")}
directory=..
autostart=false
autorestart=true
startsecs=3
startretries=5
stopsignal={signal}
stopwaitsecs=5
stopasgroup=true
killasgroup=true
redirect_stderr=true
stdout_logfile={logs}/{layout.log(service).name}
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=1
"""
        )
    return "\n".join(sections)
