"""The builtin model: converted once, loads with plain transformers, answers."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

from rlhf_core.models import check_model_folder, prepare_model, smollm2
from tests.fixtures.processes import ending


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def folder(cache):
    return prepare_model("builtin:smollm2-135m", None, "bfloat16", cache)


def test_facts(folder):
    facts = check_model_folder(folder)
    assert (facts.eos_ids, facts.vocab_size, facts.context_length) == ((2,), 49152, 8192)


def test_loads_and_answers(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert model.num_parameters() == 134_515_008
    messages = [{"role": "user", "content": "What is 2 + 3? Answer with just the number."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert output[-1] == 2
    assert "5" in tokenizer.decode(output, skip_special_tokens=True)


def test_the_cache_is_used_and_repaired(folder, cache, tmp_path, monkeypatch):
    copy = shutil.copytree(folder, tmp_path / "copy")  # converting once is enough
    monkeypatch.setattr(
        smollm2, "_write_model", lambda _, target, __: shutil.copytree(copy, target, dirs_exist_ok=True)
    )
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model("builtin:smollm2-135m", None, "bfloat16", cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    before = (folder / "model.safetensors").read_bytes()
    (folder / "config.json").unlink()
    (cache / f".{folder.name}.0.partial").mkdir()  # what a killed process leaves
    prepare_model("builtin:smollm2-135m", None, "bfloat16", cache)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert (folder / "model.safetensors").read_bytes() == before
    assert not [p for p in cache.iterdir() if p.name.endswith(".partial")]


def test_two_processes_at_once_write_one_folder(tmp_path):
    code = (
        "import sys\nfrom rlhf_core.testing.tiny_model import tiny_tokenizer_folder\n"
        "print(tiny_tokenizer_folder(sys.argv[1]))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with ending(*both):
        answers = {process.communicate(timeout=120)[0].splitlines()[-1] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(answers) == 1
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == [answers.pop().rpartition("/")[2]]


def test_importing_loads_nothing_heavy():
    code = (
        "import sys\nimport rlhf_core.models, rlhf_core.testing.tiny_model, rlhf_core.prompts.source\n"
        "import rlhf_core.prompts.tokenize, rlhf_core.prompts.order, rlhf_core.rewards.loading\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'datasets', 'pyarrow', 'prefect')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
