"""The trial of reward functions before a run."""

import pytest

from infra.settings import shell_environment
from rlhf_core.config.data import PromptsConfig, RewardConfig, RewardFunctionConfig
from rlhf_core.errors import RewardError
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.source import load_prompts
from rlhf_core.rewards import scorer
from rlhf_core.rewards.host import Conditions
from rlhf_core.rewards.trial import try_reward


def no_model():
    raise AssertionError("nobody asked for token ids")


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Function: names of functions, or bodies of `score` -> the trial's scores."""
    monkeypatch.setattr(scorer, "_PAUSE_SECONDS", 0.0)

    def run(*functions, prompts=None):
        named = []
        for number, function in enumerate(functions):
            if not function.startswith("builtin:"):
                path = tmp_path / f"score{number}.py"
                head = "from rlhf_core.rewards.contract import RewardResult\ndef score(*, prompts, completions, answers, metadata):"
                path.write_text(f"{head}\n    {function}\n")
                function = f"{path}:score"
            named.append(RewardFunctionConfig(function=function, name=f"f{number}"))
        prompts = load_prompts(PromptsConfig(), seed=0) if prompts is None else prompts
        conditions = Conditions(str(tmp_path), shell_environment(()))
        return try_reward(RewardConfig(functions=tuple(named)), conditions, prompts, no_model)

    return run


def test_trial_on_real_prompts(attempt):
    assert attempt("builtin:last_number", "builtin:exact_match").rewards == [2.0, 2.0]
    assert attempt("builtin:length", prompts=[Prompt("a", "x")]).rewards == [0.0, 0.0]
    with pytest.raises(RewardError, match="no prompts"):
        attempt("builtin:length", prompts=[])


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise KeyError('level')", "raised KeyError: 'level' (score0.py, line 3)"),
        ("return [1.0]", "returned 1 values for 2 rows"),
        ("return [1.0, float('nan')]", "returned nan"),
        ("return [float('inf')] * 2", "returned inf"),
        ("return ['good', 'bad']", "'good' (str)"),
        ("return 1.0", "a float, not a list"),
        ("return None", "a NoneType, not a list"),
        ("return 'ab'", "a str, not a list"),
        ("return [[1.0], [2.0]]", "(list)"),
        ("return [None] * len(prompts)", "no reward function had anything to say about 32 sample rows: 'f0'"),
    ],
)
def test_trial_finds_broken_functions(attempt, body, part):
    with pytest.raises(RewardError) as caught:
        attempt(body, prompts=[Prompt(str(n), "x", answer="5") for n in range(32)])
    assert "'f0'" in str(caught.value)
    assert part in str(caught.value)


def test_trial_without_any_score(attempt):
    with pytest.raises(RewardError, match=r"'f0' scored none of .* needs an answer .*answer_column"):
        attempt("builtin:last_number", prompts=[Prompt("a", "x"), Prompt("b", "y")])
    few_bad = [Prompt(str(n), "x", answer="bad" if n < 2 else "5") for n in range(100)]
    assert attempt("builtin:last_number", prompts=few_bad).status == ["invalid_data"] * 2


def test_trial_with_a_server_that_is_down(attempt):
    down = "return [RewardResult(status='failed_infra', error='no route to scorer')] * len(prompts)"
    with pytest.raises(RewardError, match="failed_infra: f1: no route to scorer"):
        attempt("builtin:last_number", down)


def test_a_function_may_have_nothing_to_say(attempt):
    assert attempt("builtin:last_number", "return [None] * len(prompts)").rewards == [1.0, 1.0]
