"""What may be asked of the sampler, and what is refused before a model loads."""

from __future__ import annotations

import pytest

from rlhf_core.config import RunConfig, check_sampling, config_fields, parse_config, stored_config
from rlhf_core.config.sampling import REFUSED_OPTIONS
from rlhf_core.errors import ConfigError
from rlhf_core.manifests import PromptsManifest, RunRecord, Shard


def forked(overrides):
    """The configuration of a fork of a run with the defaults."""
    prompts = PromptsManifest(train=Shard(key="k", first_row=0, rows=1, bytes=1, blake3="b", ids_digest="d"))
    record = RunRecord(run="r", created="2026-01-01", prompts=prompts, **config_fields(RunConfig(run="r")))
    return stored_config(record, overrides)


@pytest.mark.parametrize("option", sorted(REFUSED_OPTIONS))
def test_options_that_change_what_is_recorded_are_refused(option):
    config = parse_config({"generate": {"engine": {option: "mine", "max_num_seqs": 4}}})  # a stored run stays readable
    with pytest.raises(ConfigError, match=rf"^generate\.engine\.{option} = 'mine': not possible, .{{20,}}$"):
        check_sampling(config.generate)


@pytest.mark.parametrize("engine", [{}, {"max_num_seqs": 4}, {"enforce_eager": True, "quantization": "fp8"}])
def test_other_options_pass(engine):
    check_sampling(parse_config({"generate": {"engine": engine}}).generate)


def test_a_temperature_that_the_engine_would_raise_is_refused():
    check_sampling(parse_config({"generate": {"temperature": 0.01}}).generate)
    low = parse_config({"generate": {"temperature": 0.0099}})
    with pytest.raises(ConfigError, match=r"generate\.temperature = 0\.0099.*take 0\.01 or more"):
        check_sampling(low.generate)


def test_every_problem_is_named():
    config = parse_config({"generate": {"temperature": 0.001, "engine": {"seed": 1, "logprobs_mode": "raw_logits"}}})
    with pytest.raises(ConfigError) as error:
        check_sampling(config.generate)
    assert len(str(error.value).splitlines()) == 3


def test_an_override_is_checked_too():
    with pytest.raises(ConfigError, match=r"generate\.engine\.seed"):
        forked(["generate.engine.seed=1"])


SHAPING = ["top_p=0.9", "top_k=20", "min_p=0.05", "min_new_tokens=3"]


@pytest.mark.parametrize("setting", SHAPING)
def test_a_part_of_the_distribution_is_not_compared_with_the_whole(setting):
    key, _, value = setting.partition("=")
    words = rf"generate\.{key} = {value}: .*{{}} compares .* set algorithm\.importance_cap = 0"
    with pytest.raises(ConfigError, match=words.format(r"algorithm\.importance_cap = 2\.0")):
        forked([f"generate.{setting}"])
    with pytest.raises(ConfigError, match=words.format(r"guards\.max_engine_gap = 0\.1")):
        forked([f"generate.{setting}", "algorithm.importance_cap=0", "guards.max_engine_gap=0.1"])
    config = forked([f"generate.{setting}", "algorithm.importance_cap=0"])
    assert config.generate.reshaping == [f"generate.{key} = {value}"]


def test_stopping_earlier_is_no_other_distribution():
    config = forked(['generate.stop=["\\n"]', "generate.stop_token_ids=[5]"])
    assert config.generate.reshaping == []


def test_a_response_has_room_for_its_shortest_length():
    with pytest.raises(ConfigError, match=r"min_new_tokens = 30 is above generate\.max_new_tokens = 24"):
        parse_config({"algorithm": {"importance_cap": 0}, "generate": {"min_new_tokens": 30}})
    for bad in ({"stop": [""]}, {"stop_token_ids": [-1]}, {"top_p": 0}, {"min_p": 1}, {"top_k": -1}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            parse_config({"generate": bad})
