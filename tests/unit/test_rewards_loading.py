"""Finding reward functions by name, and the trial before a run."""

import pickle
import sys

import pytest

from rlhf_core.config.data import PromptsConfig, RewardConfig, RewardFunctionConfig
from rlhf_core.errors import RewardError
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.source import load_prompts
from rlhf_core.rewards.loading import load_rewards, resolve_reward, try_reward

BATCH = {"prompts": ["?"], "completions": ["a 5"], "answers": ["5"], "metadata": [{}]}
SIGNATURE = "*, prompts, completions, answers, metadata"


def write(tmp_path, body, name="score.py"):
    (tmp_path / name).write_text(body)
    return f"{tmp_path / name}"


def refused(function, *parts, **options):
    with pytest.raises(RewardError) as caught:
        resolve_reward(function, options)
    for part in (function, *parts):
        assert part in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def config(*functions, **options):
    return RewardConfig(functions=tuple(RewardFunctionConfig(function=f, options=options) for f in functions))


def test_builtin_and_module_functions():
    assert resolve_reward("builtin:last_number", {})(**BATCH) == [1.0]
    assert resolve_reward("rlhf_core.rewards.rules:exact_match", {})(**BATCH) == [0.0]
    assert resolve_reward("rlhf_core.rewards.rules:length", {"target": 2, "max_penalty": 4.0})(**BATCH) == [-2.0]


def test_a_function_from_a_file(tmp_path):
    path = write(
        tmp_path,
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Box:\n    value: float = 2.0\n    def score(self, **columns):\n        return [self.value]\n"
        f"box = Box()\ndef score({SIGNATURE}, scale=1.0):\n    return [scale * len(c) for c in completions]\n",
    )
    assert resolve_reward(f"{path}:score", {"scale": 0.5})(**BATCH) == [1.5]
    assert resolve_reward(f"{path}:box.score", {})(**BATCH) == [2.0]


def test_files_of_one_name_do_not_meet(tmp_path):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, f"def score({SIGNATURE}):\n    return [{value}]\n", "json.py")
    assert [resolve_reward(f"{tmp_path / f / 'json.py'}:score", {})(**BATCH) for f in ("a", "b")] == [[1.0], [2.0]]
    path = write(tmp_path / "a", f"def score({SIGNATURE}):\n    return [3.0]\n", "json.py")
    assert resolve_reward(f"{path}:score", {})(**BATCH) == [3.0]
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


def test_load_rewards_names_and_weights(tmp_path):
    path = write(tmp_path, f"def mine({SIGNATURE}):\n    return [0.0]\n")
    functions = (
        RewardFunctionConfig(),
        RewardFunctionConfig(function=f"{path}:mine", weight=0.5),
        RewardFunctionConfig(function="builtin:length", name="brevity", weight=2.0, options={"target": 5}),
    )
    loaded = load_rewards(RewardConfig(functions=functions))
    assert [(r.name, r.weight) for r in loaded] == [("last_number", 1.0), ("mine", 0.5), ("brevity", 2.0)]


def test_trial_on_real_prompts():
    prompts = load_prompts(PromptsConfig(), seed=0)
    scored = try_reward(load_rewards(config("builtin:last_number", "builtin:exact_match")), prompts)
    assert scored.rewards == [2.0, 2.0]
    assert try_reward(load_rewards(config("builtin:length")), [Prompt("a", "x")]).rewards == [0.0, 0.0]
    with pytest.raises(RewardError, match="no prompts"):
        try_reward(load_rewards(config("builtin:length")), [])


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise KeyError('level')", "raised KeyError: 'level' (score.py, line 2)"),
        ("return [1.0]", "returned 1 values for 2 rows"),
        ("return [1.0, float('nan')]", "returned nan"),
        ("return [float('inf')] * 2", "returned inf"),
        ("return ['good', 'bad']", "'good' (str)"),
        ("return [None, None]", "None (NoneType)"),
        ("return 1.0", "a float, not a list"),
        ("return None", "a NoneType, not a list"),
        ("return 'ab'", "a str, not a list"),
        ("return [[1.0], [2.0]]", "(list)"),
    ],
)
def test_trial_finds_broken_functions(tmp_path, body, part):
    path = write(tmp_path, f"def score({SIGNATURE}):\n    {body}\n")
    with pytest.raises(RewardError) as caught:
        try_reward(load_rewards(config(f"{path}:score")), load_prompts(PromptsConfig(), seed=0))
    assert "'score'" in str(caught.value)
    assert part in str(caught.value)


def test_trial_without_any_score():
    with pytest.raises(RewardError, match=r"'last_number' scored none of .* needs an answer .*answer_column"):
        try_reward(load_rewards(config("builtin:last_number")), [Prompt("a", "x"), Prompt("b", "y")])
    few_bad = [Prompt(str(n), "x", answer="bad" if n < 2 else "5") for n in range(100)]
    assert try_reward(load_rewards(config("builtin:last_number")), few_bad).status == ["invalid_data"] * 2


def test_trial_with_a_server_that_is_down(tmp_path):
    path = write(
        tmp_path,
        "from rlhf_core.rewards.contract import RewardResult\n"
        f"def score({SIGNATURE}):\n"
        "    return [RewardResult(status='failed_infra', error='no route to scorer')] * len(prompts)\n",
    )
    with pytest.raises(RewardError, match="failed_infra: score: no route to scorer"):
        try_reward(load_rewards(config("builtin:last_number", f"{path}:score")), load_prompts(PromptsConfig(), seed=0))
