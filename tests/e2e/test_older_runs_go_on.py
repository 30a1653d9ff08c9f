"""Runs that older versions wrote are trained to their end by the command.

Every one of them goes on from a checkpoint: replaying would ask for the hardware that they were made on.
"""

from __future__ import annotations

import json

import pytest

from tests.fixtures.older_runs import ARCHIVES, unpack


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def older(request, world, tmp_path_factory):
    """Function: run the command in the folder of the older runs, which has their store, with the services of the tests."""
    folder = unpack(request.param, tmp_path_factory.mktemp("older"))

    def rlhf(*arguments):
        done = world.rlhf(*arguments, cwd=folder, timeout=300, **world.services)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    rlhf.folder = folder
    return rlhf


def contents(folder):
    """What a resume must leave as it is: everything that was committed, for a run or any branch."""
    store = folder / ".rlhf" / "store" / "runs"
    return {path: path.read_bytes() for path in store.rglob("*") if path.is_file() and "lease" not in path.parts}


@pytest.mark.parametrize(
    ("run", "rates"),
    [("old", [1e-3] * 6), ("forked", [1e-3] * 2 + [5e-4] * 2)],
)
def test_a_run_is_finished(older, run, rates):
    """``rates``: the learning rate of each iteration. A fork learns with its own settings from its first stage on."""
    before = contents(older.folder)
    done = older("resume", run)
    assert "loaded the checkpoint of policy version" in done.stdout + done.stderr
    shown = json.loads(older("show", run, "--json").stdout)
    assert (shown["state"], shown["iterations_done"], shown["policy_version"]) == ("complete", len(rates), len(rates))
    assert [i["metrics"]["update/learning_rate"] for i in shown["iterations"]] == pytest.approx(rates)
    view = json.loads(older("audit", run, "--json").stdout)
    assert view["proven"], view["damage"]
    after = contents(older.folder)
    kept = {path: data for path, data in before.items() if path in after}
    assert {path: after[path] for path in kept} == kept
    assert all("checkpoints" in path.parts for path in before.keys() - kept.keys()), "only old checkpoints may go"
