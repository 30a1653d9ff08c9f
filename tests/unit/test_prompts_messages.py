"""Chat messages in the forms that data sets have."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import PromptError
from rlhf_core.prompts.source import load_prompts, split_heldout

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def load(tmp_path, *rows, **options):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(PromptsConfig(source=str(path), **options), seed=0)


def messages(tmp_path, *given, **options):
    (prompt,) = load(tmp_path, {"prompt": list(given)}, **options)
    return list(prompt.messages)


def user(content="Add 2 and 3.", **more):
    return {"role": "user", "content": content, **more}


def call(arguments):
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x1", "type": "function", "function": function}],
    }


def test_text_parts_are_joined(tmp_path):
    parts = [{"type": "text", "text": "Add 2 "}, {"type": "text", "text": "and 3."}]
    assert messages(tmp_path, user(parts)) == [user()]
    assert messages(tmp_path, user(["Add 2 and 3."])) == [user()]


def test_empty_keys_are_no_keys(tmp_path):
    assert messages(tmp_path, user(tool_calls=[], name="", weight=None, extra={})) == [user()]


def test_tool_turns(tmp_path):
    answer = {"role": "tool", "content": "5", "tool_call_id": "x1", "name": "add"}
    found = messages(tmp_path, user(), call('{"a": 2, "b": 3}'), answer)
    assert found[0] == user()
    assert found[1]["content"] == ""
    assert found[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert found[2] == answer
    assert messages(tmp_path, user(), call({"a": 2, "b": 3}), answer) == found
    assert messages(tmp_path, user(), call("no JSON"), answer)[1]["tool_calls"][0]["function"]["arguments"] == "no JSON"


def test_nulls_that_tables_add_to_tools_and_calls_are_left_out(tmp_path):
    calls = [{"name": "add", "arguments": {"a": 1, "x": None}}, {"name": "neg", "arguments": {"a": None, "x": 2}}]
    chat = [
        {"role": "user", "content": "Go.", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "0", "tool_calls": None},
    ]
    tools = [{"name": "add", "about": None}, {"name": "neg", "about": "minus"}]
    pq.write_table(pa.table({"prompt": [chat], "tools": [tools]}), tmp_path / "p.parquet")
    (prompt,) = load_prompts(PromptsConfig(source=str(tmp_path / "p.parquet")), seed=0)
    assert prompt.messages[1]["tool_calls"] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "neg", "arguments": {"x": 2}},
    ]
    assert prompt.tools == ({"name": "add"}, {"name": "neg", "about": "minus"})


def test_sharegpt(tmp_path):
    turns = [("system", "Be short."), ("human", "Hi"), ("gpt", "Yes?"), ("human", "2 + 2?")]
    found = messages(tmp_path, *({"from": sender, "value": value, "weight": None} for sender, value in turns))
    roles = ["system", "user", "assistant", "user"]
    assert found == [{"role": role, "content": value} for role, (_, value) in zip(roles, turns, strict=True)]
    rows = {"conversations": [{"from": "human", "value": "Hi"}]}
    assert load(tmp_path, rows, prompt_column="conversations")[0].messages == ({"role": "user", "content": "Hi"},)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ([{"from": "function_call", "value": "x"}], "from = 'function_call'; known are system, human"),
        ([{"from": "human"}], "the content is empty"),
        ([user(tool_calls=[{"name": "f"}])], "'tool_calls'"),
        (
            [user(), {"role": "assistant", "tool_calls": "f"}, {"role": "tool", "content": "1"}],
            "message 2: 'tool_calls'",
        ),
        ([user(name=["x"])], "name is list"),
        ([user(weight=1)], "unknown key 'weight'"),
        ([user([{"type": "image_url", "image_url": "x"}])], "message 1, part 1: only parts of the type 'text'"),
        ([user([])], "the content is empty"),
        ([user(), {"role": "assistant", "content": None}, user()], "message 2: the content is empty"),
        ([user(), call("{}")], "the last message is from the assistant"),
    ],
)
def test_messages_that_cannot_be_used(tmp_path, given, part):
    with pytest.raises(PromptError) as caught:
        load(tmp_path, {"prompt": "good"}, {"prompt": given})
    assert "line 2" in str(caught.value)
    assert part in str(caught.value)


def test_tools_make_another_prompt(tmp_path):
    bare, with_tools, as_text = load(
        tmp_path, {"prompt": "a"}, {"prompt": "a", "tools": [ADD]}, {"prompt": "a", "tools": json.dumps([ADD])}
    )
    assert with_tools.tools == as_text.tools == (ADD,)
    assert bare.tools == ()
    assert bare.prompt_id == load(tmp_path, {"prompt": "a", "tools": []})[0].prompt_id
    assert bare.prompt_id != with_tools.prompt_id
    assert as_text.prompt_id == f"{with_tools.prompt_id}-2"
    train, held = split_heldout([bare, with_tools], 1, seed=0)
    assert len(train) == len(held) == 1
    called = load(tmp_path, {"prompt": [user(), call("{}"), {"role": "tool", "content": "5"}]})[0]
    other = load(tmp_path, {"prompt": [user(), call('{"a": 1}'), {"role": "tool", "content": "5"}]})[0]
    assert called.prompt_id != other.prompt_id


@pytest.mark.parametrize("tools", ["a calculator", ["add"], {"name": "add"}, 5])
def test_a_column_of_other_tools(tmp_path, tools):
    with pytest.raises(PromptError, match=r"line 1, column 'tools'.*prompts.tools_column"):
        load(tmp_path, {"prompt": "a", "tools": tools})
    (prompt,) = load(tmp_path, {"prompt": "a", "tools": tools}, tools_column="")
    assert (prompt.tools, prompt.metadata) == ((), {"tools": tools})
