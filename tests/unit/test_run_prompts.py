"""The prompts of a run: dropped ones are recorded, and a run that has begun needs its source no more."""

from __future__ import annotations

import json

import pytest

from infra.object_store import open_store
from rlhf_core import layout
from rlhf_core.buffer import decode, read_object
from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError, PromptError, RewardError
from rlhf_core.manifests import EvaluationRecord, PromptsManifest, RunRecord
from rlhf_core.records import commit_record, load_record
from rlhf_core.testing.tiny_model import make_tiny_model, tiny_tokenizer_folder
from tasks.preflight import check_before_start
from tasks.runs import describe_run, load_config_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = tiny_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tokenizer)


@pytest.fixture
def source(tmp_path):
    """The file of prompts, and a function that writes its rows."""

    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def run(tmp_path, model):
    """Function: (keys of prompts) -> the configuration of run r, whose store is the test's folder."""

    def make(**prompts):
        defaults = {"source": str(tmp_path / "prompts.jsonl"), "heldout": 2, "max_prompt_tokens": 64}
        return parse_config(
            {
                "run": "r",
                "model": {"source": str(model), "dtype": "float32"},
                "prompts": {**defaults, **prompts},
                "generate": {"prompts_per_iteration": 2, "samples_per_prompt": 4, "max_new_tokens": 8},
                "storage": {"url": str(tmp_path / "store")},
            }
        )

    return make


def rows(count, answer=0):
    return [{"prompt": f"What is {n}?", "answer": n + answer} for n in range(count)]


def begin(config):
    """Let the run have committed something."""
    record = EvaluationRecord(run="r", name="start", policy_version=0, prompts=2, metrics={})
    commit_record(open_store(config.storage.url), layout.evaluation("r", layout.version_name(0)), record)


def recorded(config):
    return load_record(open_store(config.storage.url), layout.run_record("r"), RunRecord)


def test_too_long_prompts_are_dropped_counted_and_recorded(source, run):
    long = [{"prompt": f"{n} " + "word " * 100, "answer": 1} for n in range(2)]
    source(*rows(4), long[0], *rows(10)[4:], long[1])
    with pytest.raises(PromptError, match=r"2 of 12 prompts are too long.*prompts.too_long"):
        check_before_start(run())
    config = run(too_long="drop")
    (note,) = check_before_start(config)
    assert "dropped (prompts.too_long = 'drop'): 2; left for training: 8, held out: 2" in note
    record = recorded(config)
    dropped = decode(read_object(open_store(config.storage.url), record.prompts.dropped)).to_pylist()
    assert [row["prompt_text"] for row in dropped] == [row["prompt"] for row in long]
    assert all(row["tokens"] > 64 for row in dropped)
    begin(config)
    assert check_before_start(config) == [note]
    assert recorded(config) == record
    assert describe_run(config.storage.url, "r").prompts_dropped == 2


def test_what_is_held_out_is_chosen_from_what_fits(source, run):
    long = [{"prompt": f"{n} " + "word " * 100, "answer": 1} for n in range(30)]
    source(*long, *rows(5))
    config = run(too_long="drop", heldout=4)
    check_before_start(config)
    prompts = recorded(config).prompts
    assert (prompts.train.rows, prompts.heldout.rows, prompts.dropped.rows) == (1, 4, 30)
    with pytest.raises(PromptError, match=r"prompts.heldout = 6.*30 prompts were dropped"):
        check_before_start(run(too_long="drop", heldout=6))


def test_a_run_that_has_begun_goes_on_without_its_source(source, run):
    path = source(*rows(6))
    config = run()
    assert check_before_start(config) == []
    begin(config)
    assert check_before_start(config) == []
    record = recorded(config)
    path.unlink()
    (note,) = check_before_start(load_config_of(config.storage.url, "r"))
    assert "is gone: the run goes on with the prompts that it began with" in note
    assert recorded(config) == record


def test_a_run_that_committed_nothing_goes_on_without_its_source(source, run):
    path = source(*rows(6))
    check_before_start(run())
    record = recorded(run())
    path.unlink()
    (note,) = check_before_start(run())
    assert "is gone" in note
    assert recorded(run()) == record
    with pytest.raises(PromptError, match="the file does not exist"):
        check_before_start(run(heldout=1))


def test_a_source_that_has_changed_is_named_and_what_is_recorded_counts(source, run):
    source(*rows(6), rows(1)[0])
    config = run()
    check_before_start(config)
    begin(config)
    record = recorded(config)
    source(*rows(6)[::-1], rows(1)[0])
    assert check_before_start(config) == [], "the order is the store's"
    source(*rows(5), rows(1)[0], {"prompt": "new?", "answer": 1}, {"prompt": "newer?", "answer": 1})
    (note,) = check_before_start(config)
    assert "has changed since the run began (new: 2, gone: 1): the run goes on with" in note
    source(*rows(5, answer=1), rows(6)[5], rows(1)[0])
    (note,) = check_before_start(config)
    assert "(with another answer or other columns: " in note
    source({"question": "no prompt"})
    (note,) = check_before_start(config)
    assert "their source has become unusable" in note
    assert "'question'" in note
    assert recorded(config) == record


def test_template_variables_are_part_of_the_run(source, run):
    source(*rows(6))
    with pytest.raises(ConfigError, match=r"prompts.template.enable_thinking: the model's chat template uses no such"):
        check_before_start(run(template={"enable_thinking": False}))
    config = run()
    check_before_start(config)
    begin(config)
    with pytest.raises(ConfigError, match=r"prompts.template.enable_thinking: None -> False"):
        check_before_start(run(template={"enable_thinking": False}))


def test_rewards_without_answers_name_the_columns(source, run):
    source(*({"prompt": f"{n}?", "solution": n} for n in range(6)))
    with pytest.raises(RewardError, match=r"prompts.answer_column = 'answer'; columns found: 'solution'"):
        check_before_start(run())


def test_records_from_before_prompts_could_be_dropped_are_read():
    manifest = {"train": {"key": "k", "first_row": 0, "rows": 1, "bytes": 1, "blake3": "b", "ids_digest": "i"}}
    assert PromptsManifest.model_validate(manifest).dropped is None
