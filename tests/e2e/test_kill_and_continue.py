"""One run whose driver is killed after every stage, with its actors and without, and always started again.

The run ``k`` has the configuration of the reference run ``a``, which nobody interrupts.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DRIVER = str(Path(__file__).parents[1] / "fixtures" / "dying_driver.py")
STAGES = ("generate", "score", "advantages", "update", "sync")
#: (stage, iteration, whether the actors are killed too): where each driver in turn dies. The next one continues.
DEATHS = [
    ("generate", 0, False),
    ("score", 1, False),
    ("advantages", 2, False),
    ("update", 3, False),
    ("sync", 4, False),
    ("update", 5, True),
    ("score", 6, True),
]
#: From this driver on there are checkpoints: the last but one restores by replay, the last from a checkpoint.
FIRST_WITH_CHECKPOINTS = 6
LAST = len(DEATHS)


@dataclass
class Chain:
    """What was seen, by the number of the driver; driver n + 1 follows the n-th death."""

    exits: list[int] = field(default_factory=list)
    commits: list[dict[str, bytes]] = field(default_factory=list)
    """Manifests of the iteration that was cut off, at the time of the death."""
    states: list[dict[str, str]] = field(default_factory=list)
    """Task states of that iteration in the next driver."""
    words: list[str] = field(default_factory=list)
    """What the next driver logged. From its terminal: Prefect may not have got the last lines of a killed process."""
    output: str = ""


def start(world, number, log):
    """Driver ``number`` of the chain: a plain command at first, then ones that die right after a commit."""
    arguments = ["train", str(world.preset), "--run", "k"]
    if number >= FIRST_WITH_CHECKPOINTS:
        arguments += ["--set", "checkpoint.every=1"]
    if number in (0, LAST):
        command = [str(Path(sys.executable).with_name("rlhf")), *arguments]
    else:
        stage, iteration, _ = DEATHS[number]
        command = [sys.executable, DRIVER, f"{stage}:{iteration}", *arguments]
    return world.start(*command, log=log, **world.services)


def kill_from_outside(driver, commit, until):
    """As an operator or the kernel kills, as soon as the commit is there."""
    until(lambda: commit.exists() or driver.poll() is not None, seconds=180, pause=0.002)
    driver.kill()


@pytest.fixture(scope="module")
def chain(world, until, tmp_path_factory) -> Chain:
    logs = tmp_path_factory.mktemp("chain")
    seen = Chain()
    for number in range(LAST + 1):
        log = logs / f"driver{number}.log"
        driver = start(world, number, log)
        if number == 0:
            kill_from_outside(
                driver, world.folder / ".rlhf/store/runs/k/iterations/000000/commits/generate.json", until
            )
        driver.wait(240)
        seen.exits.append(driver.returncode)
        assert driver.returncode == (0 if number == LAST else -signal.SIGKILL), log.read_text()
        if number > 0:
            _, iteration, _ = DEATHS[number - 1]
            subflow = world.flow_runs(f"k-it{iteration:06d}")[0]
            seen.states.append(world.task_states(subflow["id"], expected=7 if number == FIRST_WITH_CHECKPOINTS else 6))
            seen.words.append(log.read_text())
        if number < LAST:
            stage, iteration, actors_too = DEATHS[number]
            seen.commits.append(world.commits("k", iteration))
            assert stage in seen.commits[-1]
            if actors_too:
                world.kill_actors()
        seen.output = log.read_text()
    return seen


@pytest.mark.parametrize("number", range(LAST), ids=[f"{s}-{'all' if a else 'driver'}" for s, _, a in DEATHS])
def test_what_was_committed_is_reused_and_the_rest_is_done(world, chain, number):
    stage, iteration, _ = DEATHS[number]
    committed = chain.commits[number]
    expected = set(STAGES[: STAGES.index(stage) + 1])
    # The first driver was killed from outside and may have come further.
    assert set(committed) >= expected if number == 0 else set(committed) == expected
    states = dict(chain.states[number])
    assert states.pop(f"it{iteration:06d}-commit") == "Completed"
    checkpoint = states.pop(f"it{iteration:06d}-checkpoint", None)
    assert checkpoint == ("Completed" if number + 1 >= FIRST_WITH_CHECKPOINTS and iteration < 6 else None)
    assert states == {f"it{iteration:06d}-{s}": "Reused" if s in committed else "Completed" for s in STAGES}


@pytest.mark.parametrize("number", range(LAST))
def test_manifests_never_change_and_nothing_is_generated_twice(world, chain, number):
    _, iteration, _ = DEATHS[number]
    now = world.commits("k", iteration)
    assert set(now) == set(STAGES)
    assert {stage: now[stage] for stage in chain.commits[number]} == chain.commits[number]
    data = world.folder / f".rlhf/store/runs/k/iterations/{iteration:06d}/data"
    for stage in ("generate", "score", "advantages"):
        if stage in chain.commits[number]:
            assert len(list((data / stage).iterdir())) == 1, f"attempts at {stage}"


def test_weights_are_those_of_the_uninterrupted_run(world, reference, chain):
    iterations = range(7)
    assert [world.weights("k", i) for i in iterations] == [world.weights("a", i) for i in iterations]


def test_the_result_is_that_of_the_uninterrupted_run(world, reference, chain):
    shown, expected = world.json("show", "k"), world.json("show", "a")
    for key in ("reward_before", "reward_after", "policy_version", "state", "iterations_done"):
        assert shown[key] == expected[key]
    assert [i["metrics"]["reward/mean"] for i in shown["iterations"]] == [
        i["metrics"]["reward/mean"] for i in expected["iterations"]
    ]
    weights = "model.safetensors"
    exports = world.folder / ".rlhf" / "exports"
    assert (exports / "k" / weights).read_bytes() == (exports / "a" / weights).read_bytes()


def test_living_actors_are_used_again(chain):
    for number in (1, 2):  # died between stages that change no weights
        assert "reattached to the living actors" in chain.words[number]
    assert "replayed" not in chain.words[1] + chain.words[2]


def test_killed_actors_are_restored_by_replay_and_then_from_a_checkpoint(chain):
    replay, checkpoint = chain.words[5], chain.words[6]
    assert "reattached" not in replay + checkpoint
    for iteration in range(6):
        assert f"replayed the update of iteration {iteration}" in replay
    assert "loaded the checkpoint" not in replay
    assert "loaded the checkpoint of policy version 6" in checkpoint
    assert "replayed" not in checkpoint


def test_finished_iterations_create_no_runs(world, chain):
    counts = [len(world.flow_runs(f"k-it{iteration:06d}")) for iteration in range(7)]
    assert counts == [2] * 7, "each iteration was cut off once and finished once"


def test_killed_drivers_do_not_stay_running_in_prefect(world, chain, until):
    states = [run["state_type"] for run in world.flow_runs("k")]
    assert sorted(states) == ["COMPLETED", *["CRASHED"] * LAST]
    alive = {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}
    body = {"flow_runs": {"name": {"any_": ["k", *(f"k-it{n:06d}" for n in range(7))]}}, "task_runs": alive}
    until(lambda: not world.prefect("task_runs/filter", body))
