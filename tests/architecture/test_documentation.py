"""What the documentation shows works: examples are loaded, links lead somewhere, commands exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from infra.settings import shell_environment
from rlhf_core.config import load_config
from rlhf_core.prompts.messages import read_conversation
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.rewards.host import Conditions
from rlhf_core.rewards.trial import try_reward

PAGES = (
    *("README.md", "CONTRIBUTING.md"),
    *("docs/architecture.md", "docs/configuration.md", "docs/operations.md", "docs/prompts.md"),
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_example_of_a_configuration_and_a_reward_is_valid(root, tmp_path, monkeypatch):
    (preset,), (reward,) = blocks(root / "README.md", "toml"), blocks(root / "README.md", "python")
    (tmp_path / "mine.toml").write_text(preset, encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(reward, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = load_config("mine.toml")
    prompt = Prompt(prompt_id="p0", text="What is 1 + 1?", messages=None, answer="2", metadata={})
    scored = try_reward(config.reward, Conditions(str(tmp_path), shell_environment(())), [prompt], lambda: tmp_path)
    assert scored.rewards == [3.0, 3.0]


def test_the_examples_of_prompts_are_valid(root, tmp_path):
    (preset,), (messages,) = (blocks(root / "docs" / "prompts.md", language) for language in ("toml", "python"))
    (tmp_path / "mine.toml").write_text(preset, encoding="utf-8")
    assert load_config(tmp_path / "mine.toml").prompts.template == {"enable_thinking": False}
    text, read = read_conversation([ast.literal_eval(line.strip()) for line in messages.splitlines()], "the page")
    assert text == "2 + 2?"
    assert [message["role"] for message in read] == ["user", "user", "assistant", "tool", "user"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page, root):
    text = re.sub(r"`[^`]*`", "", (root / page).read_text(encoding="utf-8"))
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not ((root / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page, root):
    text = (root / page).read_text(encoding="utf-8")
    folders = "flows|tasks|infra|rlhf_core|tests|docs|requirements|benchmarks"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*)`", text))
    assert sorted(name for name in named if not (root / name).exists()) == []


@pytest.mark.parametrize("page", PAGES)
def test_named_commands_exist(page, root):
    from flows.cli.main import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    text = (root / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\brlhf ([a-z]+)\b", " ".join(re.findall(r"`[^`]+`", text))))
    assert sorted(named - known) == []


def test_make_targets_exist(root):
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z]+)", (root / page).read_text(encoding="utf-8")))
        assert sorted(named - targets) == [], page
