"""Runs that older versions wrote are trained to their end by the command.

Every one of them goes on from a checkpoint: replaying would ask for the hardware that they were made on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.older_runs import ARCHIVES, unpack

RLHF = str(Path(sys.executable).with_name("rlhf"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def older(request, world, tmp_path_factory):
    """Function: run the command in the folder of the older runs, which has their store, with the services of the tests."""
    folder = unpack(request.param, tmp_path_factory.mktemp("older"))

    def rlhf(*arguments):
        command = [RLHF, *arguments]
        env = world.environment(**world.services)
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    rlhf.folder = folder
    return rlhf


def contents(folder):
    """What a resume must leave as it is: everything that was committed, for a run or any branch."""
    store = folder / ".rlhf" / "store" / "runs"
    return {path: path.read_bytes() for path in store.rglob("*") if path.is_file() and "lease" not in path.parts}


@pytest.mark.parametrize(("run", "iterations"), [("old", 6), ("forked", 4)])
def test_a_run_is_finished(older, run, iterations):
    before = contents(older.folder)
    done = older("resume", run)
    assert "loaded the checkpoint of policy version" in done.stdout + done.stderr
    shown = json.loads(older("show", run, "--json").stdout)
    assert (shown["state"], shown["iterations_done"], shown["policy_version"]) == ("complete", iterations, iterations)
    view = json.loads(older("audit", run, "--json").stdout)
    assert view["proven"], view["damage"]
    after = contents(older.folder)
    kept = {path: data for path, data in before.items() if path in after}
    assert {path: after[path] for path in kept} == kept
    assert all("checkpoints" in path.parts for path in before.keys() - kept.keys()), "only old checkpoints may go"
