"""Finding reward functions by name."""

import pickle
import sys

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards.loading import resolve_reward

BATCH = {"prompts": ["?"], "completions": ["a 5"], "answers": ["5"], "metadata": [{}]}
SIGNATURE = "*, prompts, completions, answers, metadata"


def write(tmp_path, body, name="score.py"):
    (tmp_path / name).write_text(body)
    return f"{tmp_path / name}"


def resolved(function, options):
    return resolve_reward(function, options).function


def refused(function, *parts, **options):
    with pytest.raises(RewardError) as caught:
        resolve_reward(function, options)
    for part in (function, *parts):
        assert part in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_builtin_and_module_functions():
    assert resolved("builtin:last_number", {})(**BATCH) == [1.0]
    assert resolved("rlhf_core.rewards.rules:exact_match", {})(**BATCH) == [0.0]
    assert resolved("rlhf_core.rewards.rules:length", {"target": 2, "max_penalty": 4.0})(**BATCH) == [-2.0]


def test_a_function_from_a_file(tmp_path):
    path = write(
        tmp_path,
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Box:\n    value: float = 2.0\n    def score(self, **columns):\n        return [self.value]\n"
        f"box = Box()\ndef score({SIGNATURE}, scale=1.0):\n    return [scale * len(c) for c in completions]\n",
    )
    assert resolved(f"{path}:score", {"scale": 0.5})(**BATCH) == [1.5]
    assert resolved(f"{path}:box.score", {})(**BATCH) == [2.0]


def test_files_of_one_name_do_not_meet(tmp_path):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, f"def score({SIGNATURE}):\n    return [{value}]\n", "json.py")
    assert [resolved(f"{tmp_path / f / 'json.py'}:score", {})(**BATCH) for f in ("a", "b")] == [[1.0], [2.0]]
    path = write(tmp_path / "a", f"def score({SIGNATURE}):\n    return [3.0]\n", "json.py")
    assert resolved(f"{path}:score", {})(**BATCH) == [3.0]
    assert "rlhf_reward" not in sys.modules["json"].__name__


@pytest.mark.parametrize("name", ["score", "builtin:", ":x", "", "builtin:nothing"])
def test_bad_names(name):
    refused(name)


def test_what_cannot_be_imported(tmp_path):
    refused("no_such_package.rewards:score", "ModuleNotFoundError", "no_such_package")
    refused("rlhf_core.rewards.rules:nothing", "has no attribute 'nothing'")
    refused(f"{tmp_path}/missing.py:score", "does not exist")
    path = write(tmp_path, "x = 1\n\nimport no_such_package\n")
    refused(f"{path}:score", "ModuleNotFoundError", "no_such_package", "score.py, line 3")
    path = write(tmp_path, "def score(:\n", "broken.py")
    refused(f"{path}:score", "SyntaxError", "broken.py, line 1")
    path = write(tmp_path, "x = 1\ny = x / 0\n", "divides.py")
    refused(f"{path}:score", "ZeroDivisionError: division by zero (divides.py, line 2)")
    path = write(tmp_path, "open('/no/such/file')\n", "opens.py")
    refused(f"{path}:score", "FileNotFoundError", "opens.py, line 1")
    path = write(tmp_path, "raise SystemExit(3)\n", "leaves.py")
    refused(f"{path}:score", "SystemExit", "leaves.py, line 1")
    assert not [m for m in sys.modules if m.startswith("rlhf_reward_divides")]


def test_what_cannot_be_called(tmp_path):
    path = write(
        tmp_path,
        "number = 3\nclass Reward: ...\n"
        "def two(*, prompts, completions): ...\ndef positional(prompts, completions, answers, metadata, /): ...\n"
        "def greedy(*, prompts, completions, answers, metadata, model): ...\n"
        f"def good({SIGNATURE}): ...\n",
    )
    refused(f"{path}:number", "not callable", "int")
    refused(f"{path}:Reward", "class")
    refused(f"{path}:two", "keyword arguments prompts, completions, answers, metadata", "'answers'")
    refused(f"{path}:positional", "keyword arguments")
    refused(f"{path}:greedy", "'model'")
    refused(f"{path}:good", "'scale'", scale=2)
    refused(f"{path}:good", "option 'answers'", answers=2)
    refused("builtin:last_number", "'target'", target=2)


def test_a_file_has_its_own_name_where_that_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    body = f"def score({SIGNATURE}): ...\n"
    assert resolve_reward(f"{write(tmp_path, body, 'own_name_of_a_file.py')}:score", {}).function.func.__module__ == (
        "own_name_of_a_file"
    )
    for name in ("json.py", "no-identifier.py"):
        found = resolve_reward(f"{write(tmp_path, body, name)}:score", {}).function.func.__module__
        assert found.startswith(f"rlhf_reward_{name[:-3]}_")


def test_arguments_that_are_asked_for(tmp_path):
    path = write(
        tmp_path,
        f"def both({SIGNATURE}, completion_ids, finish_reasons=None): ...\n"
        f"def none({SIGNATURE}): ...\ndef anything(**columns): ...\n",
    )
    assert resolve_reward(f"{path}:both", {}).asks_for == ("completion_ids", "finish_reasons")
    assert resolve_reward(f"{path}:none", {}).asks_for == ()
    assert resolve_reward(f"{path}:anything", {}).asks_for == ()
    refused(f"{path}:none", "option 'completion_ids'", completion_ids=1)
