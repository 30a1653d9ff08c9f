"""Tokenization with SmolLM2's real tokenizer and chat template."""

import json

import pyarrow as pa
import pytest
import transformers

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import ModelError, PromptError
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.tokenize import tokenize_prompts

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def folder(tokenizer_folder):
    return tokenizer_folder


def tokenize(prompts, folder, **options):
    """The tokenized prompts. ``context`` and ``max_new_tokens`` are limits, the other options keys of `prompts`."""
    limits = {name: options.pop(name, value) for name, value in (("context", 8192), ("max_new_tokens", 24))}
    return tokenize_prompts(prompts, folder, PromptsConfig(**options), **limits)


def chatml(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def decoded(table, folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(ids) for ids in table["prompt_ids"].to_pylist()]


def test_strings_and_messages(folder):
    messages = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "2 + 2?"},
    )
    prompts = [
        Prompt("a", "What is 3 + 4?", answer="7", metadata={"b": [1, None], "a": "ü"}),
        Prompt("b", "2 + 2?", messages=messages),
        Prompt("c", "Hi", messages=({"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"})),
    ]
    table = tokenize(prompts, folder).kept
    assert table.schema == pa.schema(
        [
            ("prompt_id", pa.string()),
            ("prompt_text", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("answer", pa.string()),
            ("metadata", pa.string()),
        ]
    )
    assert table["prompt_id"].to_pylist() == ["a", "b", "c"]
    assert table["prompt_text"].to_pylist() == ["What is 3 + 4?", "2 + 2?", "Hi"]
    assert table["answer"].to_pylist() == ["7", None, None]
    assert [json.loads(m) for m in table["metadata"].to_pylist()] == [{"b": [1, None], "a": "ü"}, {}, {}]
    turns = [("user", "Hi"), ("assistant", "Yes?"), ("user", "2 + 2?")]
    assert decoded(table, folder) == [
        chatml(("system", DEFAULT_SYSTEM), ("user", "What is 3 + 4?")),
        chatml(("system", DEFAULT_SYSTEM), *turns),
        chatml(("system", "Be short."), ("user", "Hi")),
    ]


def test_the_system_message_goes_where_there_is_none(folder):
    own = ({"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"})
    table = tokenize([Prompt("a", "Hi"), Prompt("b", "Hi", messages=own)], folder, system="Yours.").kept
    assert decoded(table, folder) == [
        chatml(("system", "Yours."), ("user", "Hi")),
        chatml(("system", "Mine."), ("user", "Hi")),
    ]


def test_more_than_one_chunk_keeps_the_order(folder):
    prompts = [Prompt(str(n), f"{n}?") for n in range(5000)]
    table = tokenize(prompts, folder, system="s").kept
    assert table["prompt_ids"].num_chunks == 1
    assert decoded(table.slice(4990), folder) == [chatml(("system", "s"), ("user", f"{n}?")) for n in range(4990, 5000)]


def test_no_prompts(folder):
    assert tokenize([], folder).kept.num_rows == 0


def test_too_long_prompts_name_row_length_and_limit(folder):
    prompts = [Prompt("short", "1?"), Prompt("long", "word " * 300), Prompt("longest", "word " * 400)]
    lengths = [len(ids) for ids in tokenize(prompts, folder).kept["prompt_ids"].to_pylist()]
    with pytest.raises(PromptError) as caught:
        tokenize(prompts, folder, context=224)
    for part in ("longest", "number 3", f"{lengths[2]} tokens", "limit is 200", "context 224", "2 of 3"):
        assert part in str(caught.value)
    with pytest.raises(PromptError, match=r"prompt longest .* the limit is 350 \(prompts.max_prompt_tokens = 350\)"):
        tokenize(prompts, folder, max_prompt_tokens=350)
    with pytest.raises(PromptError, match=r"limit is 200 .*context"):
        tokenize(prompts, folder, max_prompt_tokens=350, context=224)
    assert tokenize(prompts, folder, context=lengths[2] + 24).kept.num_rows == 3
    with pytest.raises(PromptError, match="leaves no room"):
        tokenize(prompts, folder, context=24)


def copy_tokenizer(folder, target, template):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    return target


def test_no_chat_template(folder, tmp_path):
    bare = copy_tokenizer(folder, tmp_path / "bare", None)
    with pytest.raises(ModelError, match="has no chat template") as caught:
        tokenize([Prompt("a", "Hi")], bare)
    assert str(bare) in str(caught.value)


def test_a_template_that_refuses_a_conversation(folder, tmp_path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    strict = copy_tokenizer(folder, tmp_path / "strict", template)
    own = ({"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"})
    assert tokenize([Prompt("a", "Hi")], strict).kept.num_rows == 1
    with pytest.raises(PromptError, match=r"prompt b \(number 2\).*no system role \(roles: system, user\)"):
        tokenize([Prompt("a", "Hi"), Prompt("b", "Hi", messages=own)], strict)


def test_no_tokenizer(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer in .* cannot be loaded"):
        tokenize([Prompt("a", "Hi")], tmp_path)


def test_too_long_prompts_can_be_dropped(folder):
    prompts = [
        Prompt("a", "1?", answer="1"),
        Prompt("long", "word " * 300),
        Prompt("b", "2?"),
        Prompt("c", "word " * 400),
    ]
    everything = tokenize(prompts, folder)
    assert everything.dropped.num_rows == 0
    lengths = [len(ids) for ids in everything.kept["prompt_ids"].to_pylist()]
    kept, dropped = tokenize(prompts, folder, max_prompt_tokens=lengths[1] - 1, too_long="drop")
    assert kept.equals(everything.kept.take([0, 2]))
    assert dropped.to_pylist() == [
        {"prompt_id": p.prompt_id, "prompt_text": p.text, "tokens": lengths[row]}
        for row, p in ((1, prompts[1]), (3, prompts[3]))
    ]
    assert tokenize(prompts, folder, max_prompt_tokens=lengths[1], too_long="drop").dropped[
        "prompt_id"
    ].to_pylist() == ["c"]
    with pytest.raises(PromptError, match=r"prompt c \(number 4\).*4 of 4 prompts are too long"):
        tokenize(prompts, folder, max_prompt_tokens=1, too_long="drop")
