"""A deployment: made from prefect.yaml, run by the worker, failed, and continued by what the UI's Retry button sends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhf_core.config import load_config

REPOSITORY = Path(__file__).parents[2]
REWARDS = str(REPOSITORY / "tests" / "fixtures" / "e2e_rewards.py")
STAGES = ("generate", "score", "advantages", "update", "sync", "commit")
WORDS = ("run=d", "iterations=2", "prompts.heldout=0", "limits.iterations_per_flow_run=1")
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture(scope="module")
def deployment(world):
    done = world.prefect_command("deploy", "--all", cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return "train-rlhf/rlhf-local"


@pytest.fixture(scope="module")
def config(world):
    """Parameters of a run ``d`` of two flow runs, whose reward function needs a file that is not there yet."""
    reward = {"function": f"{REWARDS}:needs_marker", "options": {"marker": str(world.folder / "marker")}}
    raw = load_config(world.preset, WORDS).model_dump(mode="json")
    return raw | {"reward": {"functions": [reward]}}


@pytest.fixture(scope="module")
def failed(world, deployment, config, until):
    """The flow run, failed in its first ``score``."""
    done = world.prefect_command("deployment", "run", deployment, "--param", f"config={json.dumps(config)}")
    assert done.returncode == 0, done.stdout + done.stderr
    (identity,) = set(re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout))
    until(lambda: world.flow_run(identity)["state_type"] in ENDED, seconds=240, pause=0.5)
    # Until the worker has seen the process end it may still report the run, retried or not, as crashed.
    until(lambda: "exited with status code" in world.logs(identity))
    return world.flow_run(identity)


@pytest.fixture(scope="module")
def retried(world, failed, until):
    """The same flow run after Retry."""
    (world.folder / "marker").touch()
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    answer = world.prefect(f"flow_runs/{failed['id']}/set_state", {"state": state, "force": False})
    assert answer["status"] == "ACCEPT"
    until(lambda: world.flow_run(failed["id"])["state_type"] in ENDED, seconds=240, pause=0.5)
    return world.flow_run(failed["id"])


@pytest.fixture(scope="module")
def following(world, retried, until):
    """The flow run that the first one started when it had done its share."""
    until(lambda: world.flow_runs("d")[0]["state_type"] in ENDED, seconds=240, pause=0.5)
    return world.flow_runs("d")[0]


@pytest.mark.parametrize(
    ("parameters", "word"),
    [({"iteratons": 1}, "iteratons"), ({"optim": {"learning_rat": 1}}, "learning_rat"), ({"iterations": "x"}, "'x'")],
)
def test_a_typo_in_the_parameters_is_refused_at_once(world, deployment, parameters, word):
    before = world.prefect("flow_runs/count", {})
    done = world.prefect_command("deployment", "run", deployment, "--param", f"config={json.dumps(parameters)}")
    assert done.returncode != 0
    assert word in done.stdout + done.stderr
    assert world.prefect("flow_runs/count", {}) == before


def test_a_reward_function_that_raises_fails_the_stage_by_name(world, failed):
    assert failed["state_type"] == "FAILED", world.logs(failed["id"])
    assert failed["name"] == "d", "the run's name, not one that Prefect made up"
    assert "needs_marker" in failed["state"]["message"]
    assert "the reward server is down" in failed["state"]["message"]
    (iteration,) = world.flow_runs("d-it000000")
    states = world.task_states(iteration["id"], expected=2)
    assert states == {"it000000-generate": "Completed", "it000000-score": "Failed"}


def test_retry_completes_the_run_and_generates_nothing_again(world, failed, retried):
    assert retried["state_type"] == "COMPLETED", world.logs(retried["id"])
    assert retried["run_count"] == failed["run_count"] + 1
    iteration = world.flow_runs("d-it000000")[0]
    states = world.task_states(iteration["id"], expected=6)
    expected = {f"it000000-{stage}": "Completed" for stage in STAGES}
    assert states == expected | {"it000000-generate": "Reused"}
    generated = world.folder / ".rlhf/store/runs/d/iterations/000000/data/generate"
    assert len(list(generated.iterdir())) == 1


def test_another_flow_run_of_the_deployment_goes_on(world, failed, retried, following):
    assert following["state_type"] == "COMPLETED", world.logs(following["id"])
    assert {run["id"] for run in world.flow_runs("d")} == {failed["id"], following["id"]}
    assert following["deployment_id"] == failed["deployment_id"]
    assert following["tags"] == failed["tags"]
    (iteration,) = world.flow_runs("d-it000001")
    assert world.task_states(iteration["id"], expected=6) == {f"it000001-{stage}": "Completed" for stage in STAGES}
    shown = world.json("show", "d")
    assert (shown["state"], shown["iterations_done"], shown["reward_after"]) == ("complete", 2, None)


def test_the_worker_works_in_the_folder_of_the_services(world, following):
    assert (world.folder / ".rlhf" / "exports" / "d" / "model.safetensors").exists()
    assert (world.folder / ".rlhf" / "tensorboard" / "d").exists()
