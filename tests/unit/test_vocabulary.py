"""Whether tokenizer and model belong together, with small tokenizers of our own."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.tokenizer import text_tokenizer
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.tokenize import tokenize_prompts
from rlhf_core.prompts.vocabulary import check_vocabulary, unended_turn

END = "<|im_end|>"
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def save(tmp_path):
    """Function: (template, end token, further special tokens) -> folder of a tokenizer whose end of turn is token 2."""

    def write(template=CHATML, eos="<|endoftext|>", extra=()):
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", END],
            show_progress=False,
        )
        raw.train_from_iterator(["What is 1 plus 2?"] * 4, trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, chat_template=template)
        tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return write


def tokenized(folder, *texts):
    prompts = [Prompt(f"p{n}", text) for n, text in enumerate(texts)]
    return tokenize_prompts(prompts, folder, PromptsConfig(), context=512, max_new_tokens=8).kept


def test_a_token_that_the_model_does_not_know(save):
    folder = save(extra=["<plan>"])
    known = text_tokenizer(folder).token_to_id("<plan>")
    table = tokenized(folder, "Add 4.", "<plan> Add 2.", "Add 3.")
    check_vocabulary(table, folder, known + 1)
    with pytest.raises(ModelError, match=rf"prompt p1 \(number 2\) has token {known} \('<plan>'\).* 0 to {known - 1}"):
        check_vocabulary(table, folder, known)
    check_vocabulary(tokenized(folder, "Add 4."), folder, known)  # what no prompt has does no harm


def test_no_prompts_have_no_tokens(save):
    folder = save()
    check_vocabulary(tokenized(folder), folder, 1)


def test_end_of_turn_that_is_no_end_token(save):
    folder = save()
    assert unended_turn(folder, [0]) == (2, END)
    assert unended_turn(folder, [0, 2]) is None


def test_engines_end_at_the_tokenizer_s_end_token_too(save):
    assert unended_turn(save(eos=END), [0]) is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
        "{{ messages[0]['content'] }}",
        "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0]['content'] }}",
    ],
    ids=["text", "nothing", "refused"],
)
def test_templates_whose_end_of_turn_is_not_known(save, template):
    assert unended_turn(save(template), [0]) is None


def test_old_tokenizer_files_decode_as_in_transformers(save):
    folder = save(eos=END)
    whole = text_tokenizer(folder)
    model = json.loads(whole.to_str())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    ids = whole.encode("What is 1 plus 2?").ids
    assert text_tokenizer(folder).decode(ids) == whole.decode(ids) == "What is 1 plus 2?"
    assert tokenized(folder, "What is 1?").num_rows == 1


def test_tokenizer_files_that_cannot_be_used(save):
    folder = save()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        text_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        text_tokenizer(folder)
