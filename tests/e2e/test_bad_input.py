"""Mistakes of a user: one message that says what, the value and the fix, in seconds, before a service or model starts.

Most commands run in this process, because each one of its own would load the same libraries again.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app

RLHF = str(Path(sys.executable).with_name("rlhf"))
FIXTURES = Path(__file__).parents[1] / "fixtures"
#: Variables that would lead to services of the caller.
FOREIGN = ("PREFECT_", "RAY_", "RLHF_", "AWS_")


@pytest.fixture
def refused(tmp_path, e2e_preset, monkeypatch):
    """Function: (settings, exit code, environment) -> the message of `rlhf train`, after checking that nothing started.

    With variables of its own the command gets a process of its own.
    """
    for key in [key for key in os.environ if key.startswith(FOREIGN)]:
        monkeypatch.delenv(key)
    monkeypatch.chdir(tmp_path)

    def run(*settings: str, code: int = 2, name: str = "r", preset: Path = e2e_preset, **environment: str) -> str:
        arguments = ["train", str(preset), "--run", name]
        arguments += [word for setting in settings for word in ("--set", setting)]
        found, stdout, stderr = outside(arguments, environment) if environment else inside(arguments)
        assert found == code, stdout + stderr
        assert stdout == ""
        assert "Traceback" not in stderr
        assert not (tmp_path / ".rlhf" / "logs").exists(), "a service was started"
        assert not list(tmp_path.glob("**/exports"))
        return stderr

    return run


def inside(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code and output of the command in this process."""
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, SystemExit), f"not reported: {done.exception!r}"
    return done.exit_code, done.stdout, done.stderr


def outside(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The same in a process with these variables."""
    done = subprocess.run(
        [RLHF, *arguments], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def prompts(tmp_path):
    """Function: rows -> setting that names a JSONL file of them."""

    def write(*rows: dict) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"prompts.source={path}"

    return write


@pytest.fixture
def model(tmp_path, e2e_model):
    """A copy of the model folder, to be damaged."""
    return Path(shutil.copytree(e2e_model, tmp_path / "model"))


def has(message: str, *words: str) -> None:
    assert all(word in message for word in words), message


# The configuration


def test_unknown_key(refused):
    message = refused("generate.prompts_per_iteratoin=4", "optim.learning_rat=1")
    has(message, "generate.prompts_per_iteratoin = 4: unknown key; did you mean 'prompts_per_iteration'?")
    has(message, "optim.learning_rat = 1: unknown key; did you mean 'learning_rate'?")


def test_batches_that_do_not_divide(refused):
    message = refused("optim.updates_per_iteration=3")
    has(message, "generate.prompts_per_iteration = 2", "optim.updates_per_iteration = 3", "take 3 prompts")


def test_value_out_of_bounds(refused):
    has(refused("generate.temperature=-1"), "generate.temperature = -1", "greater than 0")


def test_sampling_that_is_not_what_would_be_recorded(refused):
    message = refused("generate.engine.logprobs_mode=raw_logits", "generate.temperature=0.001")
    has(message, "generate.engine.logprobs_mode = 'raw_logits': not possible", "generate.temperature = 0.001", "0.01")
    has(refused("generate.top_p=0.9"), "generate.top_p = 0.9", "set algorithm.importance_cap = 0")
    has(refused("generate.stop_token_ids=[1000000]"), "[1000000] would never end a response")


@pytest.mark.parametrize("name", ["../up", "a/b", "a b", ".hidden", "x" * 64])
def test_run_name_with_path_characters(refused, name):
    has(refused(name=name), "run = ", name)


def test_preset_that_is_not_toml(refused, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("iterations = = 3")
    has(refused(preset=path), str(path), "not TOML", "line 1")


# Prompts


def test_missing_prompt_column(refused, prompts):
    message = refused(prompts({"question": "What is 1 + 1?", "answer": "2"}))
    has(message, "prompts.jsonl", "'prompt'", "question", "prompt_column")


def test_empty_prompt_file(refused, prompts):
    has(refused(prompts()), "prompts.jsonl", "has no rows")


def test_prompt_that_is_no_text(refused, prompts):
    has(refused(prompts({"prompt": 3, "answer": "2"})), "line 1", "prompt")


def test_missing_prompt_file(refused):
    has(refused("prompts.source=nowhere.jsonl"), "nowhere.jsonl", "does not exist")


def test_fewer_prompts_than_are_held_out(refused, prompts):
    has(refused(prompts({"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})), "prompts.heldout = 4")


def test_prompt_longer_than_the_context(refused, prompts, tmp_path):
    rows = [{"prompt": f"What is {n}?", "answer": "2"} for n in range(8)]
    rows[5]["prompt"] = "many words " * 2000
    source = prompts(*rows)
    message = refused(source, "prompts.max_prompt_tokens=2000")
    has(message, "(number ", "tokens, but the limit is 1016", "context 1024", "many words")
    has(refused(source, "prompts.max_prompt_tokens=16"), "the limit is 16", "prompts.max_prompt_tokens = 16")
    assert not list((tmp_path / ".rlhf").glob("store/runs/*/run.json")), "nothing of a refused run stays"


# Models


def test_model_without_tokenizer(refused, model):
    (model / "tokenizer.json").unlink()
    has(refused(f"model.source={model}"), str(model), "no tokenizer.json", "save_pretrained")


def test_model_without_chat_template(refused, model):
    (model / "chat_template.jinja").unlink()
    has(refused(f"model.source={model}"), str(model), "no chat template", "instruction-tuned")


def test_model_without_weights(refused, model):
    (model / "model.safetensors").unlink()
    has(refused(f"model.source={model}"), str(model), "no weights")


def test_model_folder_that_does_not_exist(refused, tmp_path):
    has(refused(f"model.source={tmp_path}/nowhere"), "model.source", "nowhere", "neither an existing folder")


def test_responses_longer_than_the_context(refused):
    has(refused("generate.max_new_tokens=1024"), "generate.max_new_tokens = 1024", "1024 tokens")


def test_prompt_with_a_token_that_the_model_does_not_know(refused, prompts, model):
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    plan = {"id": 49152, "content": "<plan>", "special": True}
    plan |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append(plan)
    file.write_text(json.dumps(tokenizer))
    source = prompts({"prompt": "Add 1.", "answer": "2"}, {"prompt": "<plan> Add 2.", "answer": "2"})
    message = refused(source, f"model.source={model}", "prompts.heldout=0")
    has(message, "(number 2)", "token 49152 ('<plan>')", "knows the token ids 0 to 49151", "resize_token_embeddings")


def test_context_that_does_not_fit_into_the_cache(refused):
    message = refused("resources.device=cpu", "resources.kv_cache_gib=1e-4", "prompts.max_prompt_tokens=1000")
    has(message, "resources.kv_cache_gib = 0.0001", "1009 tokens x 2048 bytes", "prompts.max_prompt_tokens (now 1000")


def test_weights_of_another_model(refused, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 50000}))
    has(refused(f"model.source={model}"), str(model), "vocab_size = 50000", "embed_tokens.weight has shape [49152")


# Stores


def test_unwritable_store(refused, tmp_path):
    (tmp_path / "file").touch()  # permissions would not stop the superuser
    has(refused(f"storage.url={tmp_path}/file/store"), "storage.url", "file/store", "cannot write objects there")


def test_store_of_an_unknown_kind(refused):
    has(refused("storage.url=gs://bucket/runs"), "storage.url", "gs://bucket/runs", "unknown scheme")


def test_s3_that_does_not_answer(refused, s3):
    with socket.socket() as free:  # bound, but it does not listen: connections are refused
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        variables = s3.env() | {"AWS_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL_S3": endpoint}
        message = refused("storage.url=s3://e2e/runs", **variables)
    has(message, "s3://e2e/runs", "does not answer", "AWS_ENDPOINT_URL")


def test_s3_with_wrong_credentials(refused, s3):
    secret = "0123456789abcdef" * 2
    message = refused("storage.url=s3://e2e/runs", **s3.env() | {"AWS_SECRET_ACCESS_KEY": secret})
    has(message, "s3://e2e/runs", "credentials are refused", "AWS_ACCESS_KEY_ID")
    assert secret not in message


def test_s3_bucket_that_does_not_exist(refused, s3):
    has(refused("storage.url=s3://other/runs", **s3.env()), "s3://other/runs", "bucket does not exist")


# Rewards


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nowhere.module:f", ["nowhere.module:f", "cannot be imported", "No module named"]),
        ("nowhere.py:f", ["nowhere.py", "does not exist"]),
        ("builtin:nothing", ["builtin:nothing", "there are last_number"]),
        (f"{FIXTURES}/e2e_rewards.py:nothing", ["has no attribute 'nothing'"]),
        (f"{FIXTURES}/e2e_rewards.py:raises", ["'raises' raised ZeroDivisionError", "e2e_rewards.py, line"]),
        (f"{FIXTURES}/e2e_rewards.py:nan", ["'nan'", "nan", "sample"]),
        (f"{FIXTURES}/e2e_rewards.py:one_short", ["'one_short' returned 1 values for 2 rows"]),
        (
            f"{FIXTURES}/e2e_rewards.py:leaves",
            ["'leaves' raised SystemExit: no key for the judge", "e2e_rewards.py, line"],
        ),
        (f"{FIXTURES}/e2e_rewards.py:needs_marker", ["needs_marker", "'marker'"]),
    ],
    ids=["module", "file", "builtin", "attribute", "raises", "nan", "length", "leaves", "option"],
)
def test_reward_function_that_cannot_be_used(refused, function, words):
    has(refused(f'reward.functions=[{{function = "{function}"}}]'), *words)


def test_reward_function_that_never_answers(refused):
    function = f'reward.functions=[{{function = "{FIXTURES}/e2e_rewards.py:hangs"}}]'
    message = refused(function, "reward.timeout_seconds=2")
    has(message, "'hangs' gave no answer within 2 s (reward.timeout_seconds) on 2 rows")


def test_reward_variable_that_is_not_set(refused):
    has(refused('reward.environment=["NO_SUCH_KEY"]'), "reward.environment names NO_SUCH_KEY", "not set here")


# Runs that exist


def test_resuming_with_another_configuration_lists_the_keys(refused, e2e_preset, tmp_path, monkeypatch):
    from rlhf_core.config import load_config
    from tasks.preflight import check_before_start

    monkeypatch.chdir(tmp_path)
    check_before_start(load_config(e2e_preset, ["run=r", "seed=9"]))  # what the command does, without starting services
    record = tmp_path / ".rlhf/store/runs/r/run.json"
    before = record.read_bytes()
    check_before_start(load_config(e2e_preset, ["run=r"]))
    assert record.read_bytes() != before, "a run that has committed nothing may still change"
    before = record.read_bytes()
    begun = record.parent / "evaluations" / "v0000000000.json"  # what the cluster's first task commits
    begun.parent.mkdir()
    begun.touch()
    message = refused("optim.learning_rate=0.1", "seed=3", "prompts.arithmetic.high=7", "iterations=50")
    has(message, "run 'r' exists with another configuration", "--run NAME")
    has(message, "optim.learning_rate: 0.001 -> 0.1", "seed: 0 -> 3", "prompts.arithmetic.high: 9 -> 7")
    assert "iterations:" not in message, "more iterations are no contradiction"
    assert record.read_bytes() == before


def test_commands_about_runs_that_do_not_exist(tmp_path):
    for words in (["resume", "nobody"], ["show", "nobody"], ["rollouts", "nobody", "0"]):
        done = subprocess.run([RLHF, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3
        assert "there is no run 'nobody'" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / ".rlhf" / "logs").exists()
