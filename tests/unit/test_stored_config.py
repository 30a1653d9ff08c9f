"""Configurations in records of older versions: upgraded, complete, compared; and what cannot be read says so."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core.config import (
    RunConfig,
    config_fields,
    contradictions,
    parse_config,
    past_config,
    stored_config,
    upgraded_fields,
)
from rlhf_core.config import upgrades as steps
from rlhf_core.config.upgrades import UPGRADES, flat, new_names, newest_schema, upgrade
from rlhf_core.errors import ConfigError, IntegrityError
from rlhf_core.lineage import load_lineage
from rlhf_core.manifests import RunRecord
from tasks import branching
from tests.fixtures.older_runs import DATA
from tests.fixtures.stored_run import record_of
from tests.fixtures.whole_run import Run

DEFAULTS = {
    int(path.stem.removeprefix("schema-")): json.loads(path.read_text()) for path in (DATA / "configs").glob("*.json")
}


def record(config, schema=1) -> RunRecord:
    return record_of("r").model_copy(update={"config": config, "config_schema": schema})


def changed(**sections):
    """The defaults of schema 1 with other values: ``section={key: value}``."""
    config = deepcopy(DEFAULTS[1])
    for name, values in sections.items():
        config[name] = {**config[name], **values}
    return config


def test_every_schema_has_its_defaults_as_data():
    assert sorted(DEFAULTS) == list(range(1, newest_schema() + 1)), "add tests/data/configs/schema-N.json"


@pytest.mark.parametrize("schema", sorted(DEFAULTS))
def test_every_schema_is_read_by_this_version(schema):
    """A knob that was renamed, removed or narrowed without a step in rlhf_core/config/upgrades.py fails here."""
    raw = DEFAULTS[schema]
    before = deepcopy(raw)
    config = stored_config(record(raw, schema))
    assert raw == before, "a step changed its argument"
    assert config.run == "r"
    assert past_config(record(raw, schema)) == config


def test_every_step_is_total():
    for schema, step in enumerate(UPGRADES, start=1):
        assert set(dict(flat(step(deepcopy(DEFAULTS[schema]))))) <= set(dict(flat(DEFAULTS[schema + 1])))
        assert step({}) == {}
        for name in DEFAULTS[schema]:
            step({k: v for k, v in deepcopy(DEFAULTS[schema]).items() if k != name})


def test_what_was_no_knob_has_its_default():
    older = changed(generate={"temperature": 0.5})
    del older["generate"]["exact_groups"], older["guards"]
    assert stored_config(record(older)) == parse_config(changed(generate={"temperature": 0.5}))
    assert contradictions(stored_config(record(older)), parse_config(changed(generate={"temperature": 0.5}))) == []


def test_writing_and_reading_are_inverse():
    config = parse_config(changed(optim={"betas": [0.8, 0.9]}, reward={"functions": [{"function": "builtin:x"}]}))
    assert stored_config(record_of("r").model_copy(update=config_fields(config))) == config
    assert stored_config(record_of("r").model_copy(update=config_fields(config, iterations=3))).iterations == 3


def test_a_record_without_a_schema_has_the_first():
    body = record_of("r").model_dump(mode="json")
    del body["config_schema"]
    assert RunRecord.model_validate(body).config_schema == 1


def test_unknown_keys_of_a_known_schema_are_named():
    raw = changed(generate={"flavour": "odd"})
    with pytest.raises(
        ConfigError, match=r"(?s)stored configuration of run r.*generate.flavour = 'odd': unknown key.*fork"
    ):
        stored_config(record(raw))
    assert past_config(record(raw)) == stored_config(record(changed()))


def test_what_is_no_longer_allowed_is_still_told():
    raw = changed(
        generate={"temperature": 7.5, "samples_per_prompt": 1},
        optim={"betas": [0.8, 0.9]},
        algorithm={"aggregation": "median"},
        reward={"functions": [{"function": "builtin:exact_match", "weight": 2}]},
    )
    with pytest.raises(ConfigError, match=r"(?s)generate.temperature = 7.5.*rlhf fork r .* --set KEY=VALUE"):
        stored_config(record(raw))
    changes = ("generate.temperature=0.7", "generate.samples_per_prompt=2", "algorithm.aggregation=token-mean")
    assert stored_config(record(raw), changes).generate.temperature == 0.7
    told = past_config(record(raw))
    assert (told.generate.temperature, told.generate.samples_per_prompt, told.rows) == (7.5, 1, 16)
    assert told.algorithm.aggregation == "median"
    assert told.optim.betas == (0.8, 0.9)
    assert told.reward.functions[0].weight == 2.0
    assert told.checkpoint == RunConfig().checkpoint


def test_a_newer_schema_is_refused():
    for read in (stored_config, past_config):
        with pytest.raises(IntegrityError, match=rf"run r has schema {newest_schema() + 1}.*use a newer prefect-rlhf"):
            read(record(changed(), newest_schema() + 1))


@pytest.fixture
def renamed(monkeypatch):
    """As if schema 1 had called `seed` `random.seed` and had a knob `optim.momentum` that is gone."""

    def step(raw):
        raw = {**raw, "optim": {k: v for k, v in raw.get("optim", {}).items() if k != "momentum"}}
        seed = raw.pop("random", {}).get("seed")
        return {k: v for k, v in {**raw, "seed": seed}.items() if v is not None and v != {}}

    def older(raw):
        raw = {**deepcopy(raw), "random": {"seed": raw["seed"]}}
        raw["optim"]["momentum"] = 0.0
        return {k: v for k, v in raw.items() if k != "seed"}

    monkeypatch.setattr(steps, "UPGRADES", (step,))
    return older


def test_older_runs_are_shown_audited_forked_and_rerun_after_a_rename(tmp_path, renamed):
    run = Run(LocalObjectStore(tmp_path / "store")).start().iterations(0, 1, 2)
    written = run.lineage.record
    older = written.model_copy(update={"config": renamed(written.config), "config_schema": 1})
    run.put("runs/r/run.json", older)
    assert upgraded_fields(older) == {"config": written.config, "config_schema": 2}
    assert run.audit().proven
    for _ in range(2):  # asking again for the same fork changes nothing
        fork = branching.fork(run.store.url, "r", 1, "update", "f", ["optim.learning_rate=0.5"])
    assert (fork.seed, fork.optim.learning_rate) == (5, 0.5)
    assert branching.rerun(run.store.url, "r", 2, "score").seed == 5
    records = load_lineage(run.store, "r").records
    assert [(r.run, r.config_schema) for r in records] == [("r~1", 2), ("r", 1)]
    assert stored_config(records[0]) == stored_config(records[1])
    assert run.store.get("runs/r/run.json").count(b'"random"') == 1, "what was stored stays as it is"
    assert run.audit().proven


def test_a_users_preset_is_not_upgraded_but_the_new_name_is_said(renamed):
    with pytest.raises(ConfigError) as caught:
        parse_config({"random": {"seed": 3}, "optim": {"momentum": 0.9}, "iteration": 3}, origin="mine.toml")
    assert str(caught.value).splitlines() == [
        "mine.toml:",
        "  optim.momentum = 0.9: unknown key",
        "  random = {'seed': 3}: unknown key; it is now 'seed'",
        "  iteration = 3: unknown key; did you mean 'iterations'?",
    ]
    assert new_names(["random", "seed"], 3) == ["seed"]
    assert upgrade({}, 1) == {}
