"""Flow runs of a deployment that go on by themselves: the automation of infra/deploy/automations.yaml, and its counter."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.automations import Automation

from infra.services.processes import stack_processes
from tasks.restarts import BY_AUTOMATION

REPOSITORY = Path(__file__).parents[2]
AUTOMATIONS = yaml.safe_load((REPOSITORY / "infra/deploy/automations.yaml").read_text())["automations"]


@pytest.fixture(scope="module")
def automation(world):
    """The one that starts runs again, in the world's server while the tests of this module run."""
    (restart,) = [a for a in AUTOMATIONS if a["name"] == "rlhf-restart"]
    done = world.prefect_command("automation", "create", "--from-json", json.dumps(restart))
    assert done.returncode == 0, done.stdout + done.stderr
    yield restart["name"]
    done = world.prefect_command("automation", "delete", restart["name"])
    assert done.returncode == 0, done.stdout + done.stderr


def kill_process_of(world, flow_run):
    """SIGKILL, as the kernel does when memory is short."""
    killed = 0
    for process in stack_processes(world.stack.layout.identity):
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run:
                process.kill()
                killed += 1
        except psutil.Error:
            continue
    assert killed, "no process of the flow run was found"


def ended(world, flow_run):
    """Whether nobody will start the flow run again."""
    return world.flow_run(flow_run)["state_type"] in ("COMPLETED", "FAILED", "CANCELLED")


def test_the_file_is_what_prefect_takes():
    names = [Automation.model_validate(raw).name for raw in AUTOMATIONS]
    assert names == ["rlhf-mark-zombies", "rlhf-restart"]
    actions = [action for automation in AUTOMATIONS for action in automation["actions"]]
    assert actions[1]["message"] == BY_AUTOMATION
    deployments = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    for deployment in deployments:
        assert "rlhf" in deployment["tags"]
        frequency = int(deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert frequency * 3 <= AUTOMATIONS[0]["trigger"]["within"]


def test_a_killed_run_goes_on_by_itself_and_waits_for_a_person_when_it_dies_too_often(world, automation, until):
    flow_run = world.start_deployed("run=again", "iterations=6", "limits.restarts=1")
    until(lambda: "score" in world.commits("again", 0), seconds=240)
    before = world.commits("again", 0)["generate"]
    kill_process_of(world, flow_run)
    until(lambda: "generate" in world.commits("again", 1), seconds=240)  # by itself
    kill_process_of(world, flow_run)
    until(lambda: ended(world, flow_run), seconds=240, pause=0.5)
    final = world.flow_run(flow_run)
    assert final["state_type"] == "FAILED", world.logs(flow_run)
    assert "limits.restarts = 1" in final["state"]["message"]
    states = [state["message"] for state in world.prefect(f"flow_run_states/?flow_run_id={flow_run}")]
    assert BY_AUTOMATION in states
    done = world.rlhf("resume", "again", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert world.json("show", "again")["state"] == "complete"
    assert world.commits("again", 0)["generate"] == before
