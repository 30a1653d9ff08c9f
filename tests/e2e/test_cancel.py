"""Cancelling a deployed run in the UI: its actors end, and the run can be continued."""

from __future__ import annotations


def cancel(world, until, flow_run):
    assert world.actor_processes()
    state = {"type": "CANCELLING", "name": "Cancelling"}
    assert world.prefect(f"flow_runs/{flow_run}/set_state", {"state": state})["status"] == "ACCEPT"
    until(lambda: world.flow_run(flow_run)["state_type"] == "CANCELLED", seconds=120, pause=0.5)
    until(lambda: not world.actor_processes(), seconds=60)


def test_a_cancelled_run_gives_its_devices_back_and_goes_on_later(world, until):
    flow_run = world.start_deployed("iterations=12")  # without a name: the run's is made from the flow run
    run = f"run-{flow_run[:8]}"
    until(lambda: "generate" in world.commits(run, 0), seconds=240)
    before = world.commits(run, 0)["generate"]
    cancel(world, until, flow_run)
    done = world.rlhf("resume", run, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert world.json("show", run)["state"] == "complete"
    assert world.commits(run, 0)["generate"] == before


def test_a_cancelled_fork_gives_its_devices_back_too(world, reference, until):
    overrides = ["iterations=12"]
    flow_run = world.start_deployment("fork-local", run="a", iteration=0, from_stage="score", overrides=overrides)
    fork = f"a-fork-{flow_run[:8]}"
    until(lambda: "score" in world.commits(fork, 0), seconds=240)
    cancel(world, until, flow_run)
