"""The process that reward functions live in: what starts it anew, what ends it, what is asked again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.settings import shell_environment
from rlhf_core.config.data import RewardConfig, RewardFunctionConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards import scorer as scorer_module
from rlhf_core.rewards.host import Conditions
from rlhf_core.rewards.scorer import Rows, Scorer

REPOSITORY = Path(__file__).parents[2]


def rows_of(*completions):
    count = len(completions)
    return Rows(
        sample_ids=[f"s{n}" for n in range(count)],
        prompts=["?"] * count,
        completions=list(completions),
        answers=[None] * count,
        metadata=[{}] * count,
        completion_ids=[[n] for n in range(count)],
        finish_reasons=["stop"] * count,
    )


@pytest.fixture
def scorer(tmp_path, monkeypatch):
    """Function: {file: source}, "file:function" ..., settings -> Scorer, closed at the end."""
    monkeypatch.setattr(scorer_module, "_PAUSE_SECONDS", 0.0)
    opened = []

    def make(files, *functions, **settings):
        for name, source in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(source)
        named = tuple(
            RewardFunctionConfig(function=f"{tmp_path / f}", name=f"f{number}") for number, f in enumerate(functions)
        )
        conditions = Conditions(str(tmp_path), shell_environment(()))
        opened.append(Scorer(RewardConfig(functions=named, **settings), conditions))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


PID = "import os\ndef score(*, completions, **_):\n    return [os.getpid()] * len(completions)\n"


def test_one_process_for_all_calls(scorer):
    found = scorer({"a.py": PID}, "a.py:score", batch_size=1)
    pids = {*found.score(rows_of("x", "y")).rewards, *found.score(rows_of("x")).rewards}
    assert len(pids) == 1
    assert pids != {float(os.getpid())}


def test_files_of_one_folder_share_a_process_and_others_do_not(scorer):
    grading = "import os\nVALUE = {}\ndef score(*, completions, **_):\n    return [VALUE] * len(completions)\n"
    uses = "from grading import VALUE\ndef score(*, completions, **_):\n    return [VALUE] * len(completions)\n"
    files = {
        "a/grading.py": grading.format(1),
        "a/uses.py": uses,
        "b/grading.py": grading.format(2),
        "b/uses.py": uses,
        "a/pid.py": PID,
        "a/other.py": PID,
    }
    found = scorer(files, "a/uses.py:score", "b/uses.py:score", "a/pid.py:score", "a/other.py:score")
    components = found.score(rows_of("x")).components
    assert (components["f0"], components["f1"]) == ([1.0], [2.0])
    assert components["f2"] == components["f3"]


@pytest.mark.parametrize("changed", ["a.py", "beside.py", "late.py"])
def test_a_change_of_what_was_imported_is_noticed(scorer, tmp_path, changed):
    body = "import beside\ndef score(*, completions, **_):\n    import late\n    return [1.0] * len(completions)\n"
    found = scorer({"a.py": body, "beside.py": "", "late.py": "", "other.py": ""}, "a.py:score")
    found.score(rows_of("x"))
    assert found.is_current()
    (tmp_path / "other.py").write_text("1\n")
    assert found.is_current()
    (tmp_path / changed).write_text(f"{(tmp_path / changed).read_text()}\n")
    assert not found.is_current()


def test_a_host_whose_function_was_ended_is_replaced(scorer, tmp_path):
    body = "import os\ndef score(*, completions, **_):\n    return os._exit(3) if completions[0] == 'end' else [1.0]\n"
    found = scorer({"a.py": body}, "a.py:score")
    with pytest.raises(RewardError, match=r"'f0' ended its process \(exit code 3\) on 1 rows, samples s0 to s0"):
        found.score(rows_of("end"))
    assert not found.is_current()
    assert found.score(rows_of("x")).rewards == [1.0]


def test_what_was_killed_from_outside_is_asked_once_more(scorer, tmp_path):
    body = (
        "import os, pathlib, signal\ndef score(*, completions, **_):\n"
        "    for mark in map(pathlib.Path, ('1', '2', '3')):\n"
        "        if mark.exists():\n            mark.unlink()\n            os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [1.0] * len(completions)\n"
    )
    found = scorer({"a.py": body}, "a.py:score")
    (tmp_path / "1").touch()
    assert found.score(rows_of("x")).rewards == [1.0]
    (tmp_path / "2").touch()
    (tmp_path / "3").touch()
    with pytest.raises(RewardError, match=r"ended its process \(SIGKILL, as when memory runs out\)"):
        found.score(rows_of("x"))


def test_only_failed_rows_are_asked_again_and_only_of_the_function_that_failed(scorer, tmp_path):
    body = (
        "from rlhf_core.rewards.contract import RewardResult\nASKED = []\n"
        "def fails(*, completions, **_):\n"
        "    ASKED.append(list(completions))\n"
        "    down = RewardResult(status='failed_infra', error='down')\n"
        "    if len(ASKED) == 1:\n        return [down if c in 'bd' else 1.0 for c in completions]\n"
        "    return [down if c == 'd' else 1.0 for c in completions]\n"
        "def counts(*, completions, **_):\n"
        "    ASKED.append('counts')\n    return [1.0] * len(completions)\n"
        "def tells(*, completions, **_):\n    print(ASKED, file=open('asked', 'w'))\n    return [0.0] * len(completions)\n"
    )
    found = scorer({"a.py": body}, "a.py:fails", "a.py:counts", retries=2)
    scored = found.score(rows_of("a", "b", "c", "d"))
    assert scored.rewards == [2.0, 2.0, 2.0, None]
    assert scored.status == ["ok", "ok", "ok", "failed_infra"]
    assert scored.error[3] == "f0: down"
    again = scorer({"b.py": body}, "b.py:fails", "b.py:counts", "b.py:tells", retries=2)
    again.score(rows_of("a", "b", "c", "d"))
    assert (tmp_path / "asked").read_text().strip() == "[['a', 'b', 'c', 'd'], 'counts']"
    again.score(rows_of("x"))
    asked = "[['a', 'b', 'c', 'd'], 'counts', ['b', 'd'], ['d'], ['x'], 'counts']"
    assert (tmp_path / "asked").read_text().strip() == asked


def test_a_stopped_host_is_ended_at_the_deadline_also_while_it_should_read(scorer):
    found = scorer({"a.py": PID}, "a.py:score", timeout_seconds=10)
    host = psutil.Process(int(found.score(rows_of("x")).rewards[0]))
    found.config = found.config.model_copy(update={"timeout_seconds": 0.1})
    host.suspend()
    with pytest.raises(RewardError, match=r"gave no answer within 0.1 s"):
        found.score(rows_of("x" * 10_000_000))
    assert not host.is_running()


def test_a_folder_that_is_not_there(scorer, tmp_path):
    found = scorer({"a.py": PID}, "a.py:score")
    found.conditions = Conditions(str(tmp_path / "gone"), shell_environment(()))
    with pytest.raises(RewardError, match=r"cannot be started in the folder '.*gone' of the run"):
        found.score(rows_of("x"))


def test_what_cannot_be_imported_is_said_each_time(scorer):
    found = scorer({"a.py": "import no_such_package\n"}, "a.py:score")
    for _ in range(2):
        with pytest.raises(RewardError, match=r"cannot be imported: ModuleNotFoundError: .* \(a.py, line 1\)"):
            found.score(rows_of("x"))


STARTS = (
    "import os, subprocess, sys\n"
    "CHILD = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    "def score(*, completions, **_):\n    return [os.getpid(), CHILD.pid]\n"
)

OWNER = """
import os, sys, time
from rlhf_core.config.data import RewardConfig, RewardFunctionConfig
from rlhf_core.rewards.host import Conditions
from rlhf_core.rewards.scorer import Scorer
from tests.unit.test_rewards_host import rows_of
functions = (RewardFunctionConfig(function=sys.argv[1]),)
scored = Scorer(RewardConfig(functions=functions), Conditions("/", dict(os.environ))).score(rows_of("x", "y"))
print(*map(int, scored.rewards), flush=True)
sys.stdin.read()
"""


def test_a_host_and_what_it_started_end_with_their_owner(tmp_path):
    (tmp_path / "a.py").write_text(STARTS)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"{tmp_path / 'a.py'}:score"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        started = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(started) == 2
        owner.send_signal(signal.SIGKILL)
    # Nobody waits for them any more: what is left is at most the entry of a process that has ended.
    assert [p for p in psutil.wait_procs(started, timeout=60)[1] if p.status() != psutil.STATUS_ZOMBIE] == []


def test_closing_ends_what_user_code_started(scorer):
    found = scorer({"a.py": STARTS}, "a.py:score")
    host, child = (psutil.Process(int(pid)) for pid in found.score(rows_of("x", "y")).rewards)
    found.close()
    assert not host.is_running()
    assert [p for p in psutil.wait_procs([child], timeout=60)[1] if p.status() != psutil.STATUS_ZOMBIE] == []
