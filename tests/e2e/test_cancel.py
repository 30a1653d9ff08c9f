"""Cancelling a deployed run in the UI: its actors end, and the run can be continued."""

from __future__ import annotations


def test_a_cancelled_run_gives_its_devices_back_and_goes_on_later(world, until):
    flow_run = world.start_deployed("iterations=12")  # without a name: the run's is made from the flow run
    run = f"run-{flow_run[:8]}"
    until(lambda: "generate" in world.commits(run, 0), seconds=240)
    assert world.actor_processes()
    state = {"type": "CANCELLING", "name": "Cancelling"}
    assert world.prefect(f"flow_runs/{flow_run}/set_state", {"state": state})["status"] == "ACCEPT"
    until(lambda: world.flow_run(flow_run)["state_type"] == "CANCELLED", seconds=120, pause=0.5)
    until(lambda: not world.actor_processes(), seconds=60)
    before = world.commits(run, 0)["generate"]
    done = world.rlhf("resume", run, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert world.json("show", run)["state"] == "complete"
    assert world.commits(run, 0)["generate"] == before
