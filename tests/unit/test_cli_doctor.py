import json
import os
import socket
import subprocess
import sys

import pytest

from infra import doctor
from infra.services import Service, ServiceStack
from infra.services.layout import SOCKET_PATH_LIMIT, Layout
from infra.services.programs import Ports, server_settings, stack_environment, supervisor_config
from infra.settings import Settings


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]  # bound, but nobody listens


def test_doctor_as_a_command_finds_a_broken_store(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "flows.cli.main", "doctor", "--json", "--store", str(tmp_path / "file" / "store")]
    environment = {**os.environ, "RLHF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 2
    assert checks["store"]["ok"] is False
    assert checks["store"]["fix"]
    assert checks["Python"]["ok"] is True
    assert checks["Prefect"]["ok"] is True
    assert not (tmp_path / "home").exists()


def test_a_working_store_passes(tmp_path):
    assert doctor.check_store(str(tmp_path / "store")).ok is True
    assert doctor.check_store("ftp://x").ok is False


def test_servers_of_the_environment_that_do_not_answer(closed_port):
    settings = Settings(PREFECT_API_URL=f"http://127.0.0.1:{closed_port}/api", RAY_ADDRESS=f"127.0.0.1:{closed_port}")
    status = ServiceStack("nowhere").status()
    assert doctor.check_prefect(settings, status).ok is False
    assert "PREFECT_API_URL" in doctor.check_prefect(settings, status).fix
    assert doctor.check_ray(settings, status).ok is False
    assert doctor.check_ray(Settings(RAY_ADDRESS="auto"), status).ok is None


def test_installed_packages_fit():
    found = [*doctor.check_packages(), *doctor.check_torch()]
    assert [check for check in found if not check.ok] == []


def test_disks_of_a_home_that_does_not_exist_yet(tmp_path):
    local = list(doctor.check_disks(tmp_path / "a" / "b", str(tmp_path / "store")))
    assert [check.name for check in local] == ["disk of the home", "disk of the store"]
    assert all(str(tmp_path) in check.found for check in local)
    assert [check.name for check in doctor.check_disks(tmp_path, "s3://bucket/x")] == ["disk of the home"]


def test_sockets_of_a_deep_home_go_elsewhere(tmp_path):
    deep = tmp_path.joinpath(*["a-folder-with-a-name"] * 5)
    check = doctor.check_sockets(deep)
    assert check.ok is True
    assert "too long" in check.found
    for home in (deep, tmp_path, tmp_path / "x", tmp_path.parent):
        session = "session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store"
        assert len(os.fsencode(Layout(home).ray_folder / session)) <= SOCKET_PATH_LIMIT


def test_server_settings_are_those_of_the_file():
    settings = server_settings()
    assert settings["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert settings["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"].endswith(".filesystem")
    assert all(name.startswith("PREFECT_SERVER_") for name in settings)


def test_the_stack_is_closed_to_the_callers_servers(tmp_path):
    inherited = {
        "PATH": "/bin",
        "PREFECT_API_KEY": "secret",
        "PREFECT_PROFILE": "cloud",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_AUTH_TOKEN": "other",
        "AWS_ACCESS_KEY_ID": "kept",
        "NO_PROXY": "example.org",
    }
    environment = stack_environment(Layout(tmp_path), Ports(prefect=1, ray=2, ray_client=3), inherited)
    assert "PREFECT_API_KEY" not in environment
    assert "PREFECT_PROFILE" not in environment
    assert "RAY_AUTH_TOKEN" not in environment
    assert environment["RAY_ADDRESS"] == "127.0.0.1:2"
    assert environment["AWS_ACCESS_KEY_ID"] == "kept"
    assert environment["NO_PROXY"] == environment["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "60"


def test_supervisor_configuration_keeps_the_home_out(tmp_path):
    from configparser import ConfigParser

    home = tmp_path / "50% of it's here"
    text = supervisor_config(Layout(home), Ports(prefect=1, ray=2, ray_client=3), 1 << 30)
    parsed = ConfigParser(interpolation=None)
    parsed.read_string(text)
    assert {f"program:{service.value}" for service in Service} < set(parsed.sections())
    assert "50%" not in text


def test_ports_are_kept_while_they_are_free():
    first = Ports.choose(None)
    assert Ports.choose(first) == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first.prefect))
        taken.listen()
        second = Ports.choose(first)
    assert second.prefect != first.prefect
    assert (second.ray, second.ray_client) == (first.ray, first.ray_client)
