"""Home folders in paths of the configuration and of the command."""

from pathlib import Path

import pytest

from flows.cli.driving import store_url
from flows.cli.presets import find_preset
from rlhf_core.config import contradictions, load_config, parse_config
from rlhf_core.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_home_folders_are_expanded_wherever_a_path_is_given(home, tmp_path):
    preset = tmp_path / "p.toml"
    preset.write_text(
        'model.source = "~/model"\nprompts.source = "~/data/*.jsonl"\n'
        'storage = {url = "file://~/store", export = "~/out"}\n[[reward.functions]]\nfunction = "~/r.py:score"\n'
    )
    config = load_config(preset, ["model.source=~/other"])
    assert config.model.source == f"{home}/other"
    assert config.prompts.source == f"{home}/data/*.jsonl"
    assert config.storage.url == f"file://{home}/store"
    assert config.storage.export == f"{home}/out"
    assert config.reward.functions[0].function == f"{home}/r.py:score"
    assert store_url("~/store") == f"{home}/store"
    assert find_preset("~/p.toml") == Path(preset)


def test_what_is_no_home_stays():
    for path in ("./~/x", "a/~b", "s3://bucket/~x", ".rlhf/store"):
        assert parse_config({"storage": {"url": path}}).storage.url == path
        assert store_url(path) == path


def test_a_home_that_nobody_has():
    with pytest.raises(ConfigError, match=r"storage.export = '~nobody-here/x'.*no home folder '~nobody-here'"):
        parse_config({"storage": {"export": "~nobody-here/x"}})
    with pytest.raises(ConfigError, match="no home folder '~nobody-here'"):
        store_url("~nobody-here/x")


def test_a_stored_home_is_the_expanded_one(home):
    stored, wanted = ({"model": {"source": source}} for source in ("~/model", f"{home}/model"))
    assert contradictions(parse_config(stored), parse_config(wanted)) == []


def test_numbers_of_too_many_digits_are_no_traceback(tmp_path):
    preset = tmp_path / "p.toml"
    preset.write_text(f"seed = {'9' * 5000}")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(preset)
    preset.write_text("")
    with pytest.raises(ConfigError, match="seed"):
        load_config(preset, [f"seed={'9' * 5000}"])
