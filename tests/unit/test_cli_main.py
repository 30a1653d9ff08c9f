"""The command itself, as a process: exit codes, messages, and what it imports."""

import os
import subprocess
import sys
from datetime import datetime

import pytest

from flows.cli.errors import EXIT_STATE, EXIT_USER, exit_code_of
from flows.cli.presets import find_preset, load_run_config, new_run_name
from infra.services import ServiceError
from rlhf_core.config import RunConfig
from rlhf_core.errors import (
    CapacityError,
    ConfigError,
    CorruptObject,
    NotCommitted,
    RunLocked,
    StoreError,
    WorkerError,
)

PRESET = """
iterations = 3
[generate]
prompts_per_iteration = 8
"""


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "my preset.v2.toml"
    path.write_text(PRESET)
    return path


def rlhf(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "flows.cli.main", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command_and_imports_nothing_heavy(tmp_path):
    program = """
import sys
from flows.cli.main import main
sys.argv = ["rlhf", "--help"]
try:
    main()
finally:
    heavy = {"prefect", "ray", "torch", "pyarrow", "pydantic", "rich", "transformers", "vllm", "psutil"}
    print("HEAVY", sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in (
        "up",
        "down",
        "train",
        "resume",
        "rerun",
        "fork",
        "runs",
        "show",
        "rollouts",
        "audit",
        "gc",
        "doctor",
    ):
        assert f"\n  {command} " in done.stdout
    assert "HEAVY []" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.toml"], ["nowhere.toml", "does not exist"]),
        (["train", "."], ["'.' is a folder"]),
        (["train", "PRESET", "--set", "iteratons=3"], ["iteratons", "did you mean 'iterations'"]),
        (["train", "PRESET", "--set", "optim.updates_per_iteration=3"], ["not divisible"]),
        (["train", "PRESET", "--set", "iterations"], ["section.key=value"]),
        (["train", "PRESET", "--run", "../up"], ["run", "../up"]),
        (["train"], ["PRESET"]),
        (["fly"], ["fly"]),
        (["rollouts", "r", "-1"], ["-1"]),
        (["rerun", "r", "--from", "score"], ["--iteration"]),
        (["rerun", "r", "--iteration", "0"], ["--from"]),
        (["rerun", "r", "--iteration", "-1", "--from", "score"], ["'--iteration'", "greater than or equal to 0"]),
        (["rerun", "r", "--iteration", "0", "--from", "commit"], ["'commit'", "generate, score, advantages"]),
        (["rerun", "../up", "--iteration", "0", "--from", "score"], ["run id '../up'"]),
        (["rerun", "r", "--iteration", "0", "--from", "score", "--set", "seed=1"], ["--set"]),
        (["fork", "r", "--iteration", "x", "--from", "score"], ["'--iteration'", "integer"]),
        (["fork", "r", "--iteration", "0", "--from", "fly"], ["'fly'", "generate, score, advantages"]),
        (["fork", "r", "--iteration", "0", "--from", "score", "--store", "ftp://x"], ["ftp://x"]),
        (["gc", "../up"], ["run id '../up'"]),
        (["audit", "../up"], ["run id '../up'"]),
    ],
)
def test_mistakes_give_one_message_and_exit_2(preset, tmp_path, arguments, words):
    done = rlhf(*(str(preset) if a == "PRESET" else a for a in arguments), cwd=tmp_path)
    assert done.returncode == EXIT_USER, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / ".rlhf").exists()


@pytest.mark.parametrize("command", ["rerun", "fork"])
def test_a_branch_of_a_run_that_does_not_exist(tmp_path, command):
    done = rlhf(command, "nobody", "--iteration", "0", "--from", "score", cwd=tmp_path)
    assert done.returncode == EXIT_STATE, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlhf: there is no run 'nobody' in ")
    assert not (tmp_path / ".rlhf").exists()


def test_down_without_services_does_nothing(tmp_path):
    done = rlhf("down", cwd=tmp_path, RLHF_HOME=str(tmp_path / "home"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "home").exists()


def test_up_in_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    done = rlhf("up", cwd=tmp_path, RLHF_HOME=str(tmp_path / "file" / "home"))
    assert done.returncode == EXIT_USER
    assert "set RLHF_HOME" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), EXIT_USER),
        (StoreError("x"), EXIT_USER),
        (CapacityError("x"), EXIT_USER),
        (ServiceError("x"), EXIT_USER),
        (RunLocked("x"), EXIT_STATE),
        (NotCommitted("x"), EXIT_STATE),
        (CorruptObject("x"), EXIT_STATE),
        (WorkerError("x"), 3),
        (OSError("x"), None),
        (ValueError("x"), None),
    ],
)
def test_exit_codes(error, code):
    assert exit_code_of(error) == code


def test_a_new_name_holds_the_preset_and_the_time(preset):
    assert new_run_name("laptop", datetime(2026, 1, 2, 3, 4, 5)) == "laptop-20260102-030405"
    config = load_run_config(str(preset), ["iterations=4"])
    assert config.iterations == 4
    assert config.run_id.startswith("my-preset-v2-20")


@pytest.mark.parametrize("stem", ["a" * 100, "ünïcode", "...", "-x-", "_", "a.b c", "1"])
def test_made_names_are_valid(stem):
    assert RunConfig(run=new_run_name(stem)).run_id


@pytest.mark.parametrize("name", ["123", "true", "2026-01-01", "a.b", "x"])
def test_a_name_is_a_string_whatever_it_looks_like(preset, name):
    assert load_run_config(str(preset), ["run='other'"], name).run_id == name


def test_the_name_in_the_preset_is_kept(preset):
    assert load_run_config(str(preset), ["run=kept"]).run_id == "kept"


def test_an_existing_file_goes_before_a_shipped_preset(preset, monkeypatch):
    monkeypatch.chdir(preset.parent)
    (preset.parent / "laptop").write_text(PRESET)
    assert find_preset("laptop").read_text() == PRESET


SESSION = """
import sys
import infra.services
from flows.cli.session import open_session
session = open_session(print)
print(session.ui_url, session.local, "prefect" in sys.modules, "ray" in sys.modules)
"""


def test_session_uses_the_servers_of_the_environment(tmp_path):
    environment = {"PREFECT_API_URL": "http://server:4200/api", "RAY_ADDRESS": "10.0.0.1:6379"}
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["http://server:4200", "False", "False", "False"], done.stderr
    assert not (tmp_path / ".rlhf").exists()
