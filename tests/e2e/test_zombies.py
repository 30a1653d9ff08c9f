"""What killed drivers leave in Prefect: flow and task runs that nobody will ever end, until the next driver does."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil

from infra.services.processes import stack_processes

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
ALIVE = ["RUNNING", "PENDING", "CANCELLING"]

#: What drivers of the run ``z`` were killed in, made with Prefect's own client, and then the look of a living driver at it.
LEFT_BEHIND = """
import json
from prefect import flow, get_client, task
from prefect.states import Completed, Crashed, Failed, Running
from rlhf_core.config import RunConfig
from tasks.zombies import end_zombies

@flow(name="train-rlhf")
def training(config=None): pass

@task(name="stage")
def stage(): pass

CONFIG = RunConfig(run="z")

def run(client, name, state, parent=None, url=CONFIG.storage.url):
    parameters = {"config": {"run": name, "storage": {"url": url}}}
    return client.create_flow_run(training, name=name, state=state, parent_task_run_id=parent, parameters=parameters)

def work(client, owner, name):
    return client.create_task_run(stage, owner.id, dynamic_key=name, name=name, state=Running())

made = {}
with get_client(sync_client=True) as client:
    for state in (Running(), Crashed(), Completed(), Failed()):
        training_run = run(client, "z", state)
        made[f"training {state.name}"] = ("flow_runs", training_run.id)
        made[f"iteration of {state.name}"] = ("task_runs", work(client, training_run, "iteration-000008").id)
    iteration = run(client, "z-it000008", Running())
    made["iteration"] = ("flow_runs", iteration.id)
    made["stage"] = ("task_runs", work(client, iteration, "it000008-update").id)
    for kind, state in (("dead", Running()), ("ended", Completed())):
        caller = run(client, f"p-fork-{kind}", Running())
        call = work(client, caller, f"call-{kind}")
        run(client, "z", state, parent=call.id)
        made[f"caller, {kind}"] = ("flow_runs", caller.id)
        made[f"work of the caller, {kind}"] = ("task_runs", work(client, caller, "start-fork").id)
    others = {name: run(client, name, Running()) for name in ("zz", "z2-it000001")}
    others["z of another store"] = run(client, "z", Running(), url="another/store")
    for name, other in others.items():
        made[name] = ("flow_runs", other.id)
        made[f"work of {name}"] = ("task_runs", work(client, other, "iteration-000001").id)

@task(task_run_name="looking")
def look():
    return end_zombies(CONFIG)

@flow(flow_run_name="z")
def driver():
    return look()

@flow(flow_run_name="z-rerun-it8-score")
def calling():
    return driver()

ended = [calling(), calling()]
print("MADE", json.dumps([{k: (kind, str(i)) for k, (kind, i) in made.items()}, ended]))
"""


def test_everything_of_killed_drivers_is_ended_and_nothing_else(world):
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND],
        cwd=world.folder,
        env=world.environment(**world.services),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MADE ")]
    made, ended = json.loads(line.removeprefix("MADE "))
    states = {what: world.prefect(f"{kind}/{identity}")["state_name"] for what, (kind, identity) in made.items()}
    replaced = {what for what, state in states.items() if state == "Replaced"}
    assert replaced == {
        "training Running",
        "iteration of Running",
        "iteration of Crashed",
        "iteration",
        "stage",
        "caller, dead",
        "work of the caller, dead",
    }
    assert {what for what, state in states.items() if state == "Running"} == {
        "iteration of Completed",
        "iteration of Failed",
        "caller, ended",
        "work of the caller, ended",
        "zz",
        "work of zz",
        "z2-it000001",
        "work of z2-it000001",
        "z of another store",
        "work of z of another store",
    }
    assert ended[0] >= len(replaced)
    assert ended[1] == 0, "what was ended, and what runs here, is not ended again"
    (caller, _) = world.flow_runs("z-rerun-it8-score")
    assert caller["state_type"] == "COMPLETED"


def alive(world, run):
    """Names of the task runs that show as running in the flow runs of a run."""
    body = {
        "flow_runs": {"name": {"like_": run}},
        "task_runs": {"state": {"type": {"any_": ALIVE}}},
    }
    return [row["name"] for row in world.prefect("task_runs/filter", body)]


def test_a_retried_run_leaves_no_task_run_of_its_killed_process(world, until):
    flow_run = world.start_deployed("run=struck", "iterations=3")
    until(lambda: "score" in world.commits("struck", 1), seconds=240)
    for process in stack_processes(world.stack.layout.identity):
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run:
                process.kill()
        except psutil.Error:
            continue
    until(lambda: world.flow_run(flow_run)["state_type"] == "CRASHED", seconds=120, pause=0.5)
    assert alive(world, "struck")  # which ones depends on what the killed process had told the server yet
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    assert world.prefect(f"flow_runs/{flow_run}/set_state", {"state": state, "force": False})["status"] == "ACCEPT"
    until(lambda: world.flow_run(flow_run)["state_type"] in ENDED, seconds=240, pause=0.5)
    assert world.flow_run(flow_run)["state_type"] == "COMPLETED", world.logs(flow_run)
    until(lambda: not alive(world, "struck"))
    body = {"flow_runs": {"id": {"any_": [flow_run]}}}

    def states(run_count, *names):
        rows = [row for row in world.prefect("task_runs/filter", body) if row["flow_run_run_count"] == run_count]
        return {row["name"]: row["state_name"] for row in rows if row["name"] in names}

    own = ("preflight", "cluster", "iteration-000001", "iteration-000002", "export-v3")
    until(lambda: states(2, *own) == dict.fromkeys(own, "Completed"))  # Prefect hears of them later
    assert not alive(world, "struck")
