"""Prompt sources: every format, every bad input, and the held-out split."""

import dataclasses
import datetime
import json
import pickle
from decimal import Decimal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import PromptError
from rlhf_core.prompts.source import load_prompts, split_heldout


def write_jsonl(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def load(source, **options):
    return load_prompts(PromptsConfig(source=str(source), **options), seed=0)


def refused(source, *parts, **options):
    with pytest.raises(PromptError) as caught:
        load(source, **options)
    for part in parts:
        assert part in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_jsonl_with_strings_and_messages(tmp_path):
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "2 + 2?"},
    ]
    source = write_jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "1 + 1?", "answer": 2, "level": 3, "tags": ["a", {"b": None}]},
        "",
        {"prompt": chat, "answer": "4"},
        {"prompt": "no answer, ünïcode"},
    )
    first, second, third = load(source)
    assert (first.text, first.messages, first.answer) == ("1 + 1?", (), "2")
    assert first.metadata == {"level": 3, "tags": ["a", {"b": None}]}
    assert (second.text, list(second.messages), second.answer, second.metadata) == ("2 + 2?", chat, "4", {})
    assert third.answer is None
    assert load(source) == [first, second, third]
    assert len({first, second, third}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.text = "other"


def test_prompt_ids_are_unique_and_come_from_the_content(tmp_path):
    same, other = {"prompt": "a"}, {"prompt": "b"}
    ids = [p.prompt_id for p in load(write_jsonl(tmp_path / "p.jsonl", same, other, same, same))]
    assert len(set(ids)) == 4
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    moved = [p.prompt_id for p in load(write_jsonl(tmp_path / "q.jsonl", other, same))]
    assert moved == [ids[1], ids[0]]


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\n')
    assert load(tmp_path / "p.jsonl")[0].text == "a"


def test_other_columns_names_can_be_chosen(tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", {"question": "q", "solution": "s", "prompt": "x"})
    (prompt,) = load(source, prompt_column="question", answer_column="solution")
    assert (prompt.text, prompt.answer, prompt.metadata) == ("q", "s", {"prompt": "x"})
    refused(source, "prompt_column", "answer_column", "'question'", prompt_column="question", answer_column="question")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (-2.5, "-2.5"),
        (4.0, "4"),
        (1e-07, "0.0000001"),
        (1e21, "1" + "0" * 21),
        (10**308, "1" + "0" * 308),
        ("x", "x"),
        (None, None),
        (True, "true"),
        (["4", 4.5, None], '["4", 4.5, null]'),
        ({"a": "ü"}, '{"a": "ü"}'),
    ],
)
def test_answers_become_text(tmp_path, value, text):
    assert load(write_jsonl(tmp_path / "p.jsonl", {"prompt": "a", "answer": value}))[0].answer == text


def test_parquet_with_gaps_dates_and_decimals(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "answer": pa.array([1.0, float("nan")]),
            "day": [datetime.date(2026, 1, 2), None],
            "price": [Decimal("1.50"), None],
            "score": [float("inf"), 0.5],
        }
    )
    pq.write_table(table, tmp_path / "p.parquet")
    first, second = load(tmp_path / "p.parquet")
    assert (first.answer, second.answer) == ("1", None)
    assert first.metadata == {"day": "2026-01-02", "price": "1.50", "score": None}
    assert second.metadata == {"day": None, "price": None, "score": 0.5}
    json.dumps([first.metadata, second.metadata], allow_nan=False)


def test_parquet_with_chat_messages(tmp_path):
    pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "hi"}]]}), tmp_path / "p.parquet")
    assert load(tmp_path / "p.parquet")[0].messages == ({"role": "user", "content": "hi"},)


def test_folders_saved_by_datasets(tmp_path):
    data = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": ["1", "2", "3"]})
    data.select([2, 0]).save_to_disk(str(tmp_path / "one"))
    assert [p.text for p in load(tmp_path / "one")] == ["c", "a"]
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert [p.text for p in load(tmp_path / "two")] == ["a", "b", "c"]
    assert [p.text for p in load(tmp_path / "two", split="test")] == ["b"]
    refused(tmp_path / "two", "'valid'", "'train', 'test'", split="valid")
    datasets.Dataset.from_dict({"prompt": ["a"]}, split="test").save_to_disk(str(tmp_path / "three"))
    assert [p.text for p in load(tmp_path / "three", split="test")] == ["a"]
    refused(tmp_path / "three", "'train'", "holds the split 'test'")


def test_folders_that_are_no_data_set(tmp_path):
    refused(tmp_path, "was not saved by `datasets.save_to_disk`")
    (tmp_path / "state.json").write_text("{}")
    refused(tmp_path, "cannot be loaded")


def test_a_hub_id_without_the_hub(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/no-such-data-set", "nobody/no-such-data-set", "Hugging Face hub", "network")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("missing.jsonl", "does not exist"),
        ("missing.parquet", "does not exist"),
        ("missing.csv", "unknown file ending '.csv'"),
        ("some/deep/missing/thing", "neither an existing file or folder"),
    ],
)
def test_missing_files(tmp_path, name, part):
    refused(tmp_path / name, part, name)


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz", "p.parquet.gz", "p"])
def test_unknown_endings(tmp_path, name):
    (tmp_path / name).write_text("prompt\na\n")
    refused(tmp_path / name, "unknown file ending", ".jsonl", ".parquet")


def test_empty_sources(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n\n")
    refused(tmp_path / "p.jsonl", "has no rows")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "p.parquet")
    refused(tmp_path / "p.parquet", "has no rows")


def test_broken_files(tmp_path):
    refused(write_jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, '{"prompt": '), "line 2", "not JSON")
    refused(write_jsonl(tmp_path / "b.jsonl", '["a"]'), "line 1", "list", "object")
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    refused(tmp_path / "c.jsonl", "line 2", "UTF-8")
    refused(write_jsonl(tmp_path / "d.jsonl", {"prompt": "a"}, '{"prompt": "\\ud800"}'), "line 2", "Unicode")
    (tmp_path / "e.parquet").write_text("no parquet")
    refused(tmp_path / "e.parquet", "not a readable Parquet file")


def test_missing_columns_name_those_there_are(tmp_path):
    refused(write_jsonl(tmp_path / "p.jsonl", {"question": "a", "solution": 1}), "'question', 'solution'", "line 1")
    refused(write_jsonl(tmp_path / "q.jsonl", {"prompt": "a"}, {"question": "b"}), "'question'", "line 2")
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "p.parquet")
    refused(tmp_path / "p.parquet", "'prompt'", "'question'")


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (5, "int"),
        (None, "NoneType"),
        ({"role": "user"}, "dict"),
        ([], "no message with the role 'user'"),
        ([{"role": "system", "content": "x"}], "no message with the role 'user'"),
        (["hi"], "message 1"),
        ([{"role": "human", "content": "x"}], "'human'"),
        ([{"role": "user", "content": 5}], "content is int"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "message 1, part 1"),
        ([{"role": "user", "content": " "}], "empty"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "'tool_calls'"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "last message"),
    ],
)
def test_bad_prompts_name_their_row(tmp_path, prompt, part):
    refused(write_jsonl(tmp_path / "p.jsonl", {"prompt": "good"}, {"prompt": prompt}), "line 2", part)


def test_bad_rows_of_tables_are_counted_from_one(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", "b", ""]}), tmp_path / "p.parquet")
    refused(tmp_path / "p.parquet", "row 3", "empty")
    pq.write_table(pa.table({"prompt": ["a"], "image": [b"\x00"]}), tmp_path / "q.parquet")
    refused(tmp_path / "q.parquet", "row 1", "'image'", "bytes")


def test_heldout_split_is_deterministic_and_disjoint_by_content(tmp_path):
    rows = [{"prompt": f"q{i % 30}", "answer": i} for i in range(90)]
    rows.append({"prompt": [{"role": "user", "content": "q0"}]})  # the same conversation as the string "q0"
    prompts = load(write_jsonl(tmp_path / "p.jsonl", *rows))
    for seed in range(5):
        train, held = split_heldout(prompts, 10, seed)
        assert (train, held) == split_heldout(prompts, 10, seed)
        assert len(held) == 10
        assert len({p.text for p in held}) == 10
        assert not {p.text for p in held} & {p.text for p in train}
        assert len({p.text for p in train}) == 20
        assert train == [p for p in prompts if p in set(train)]
        assert {p.text for p in split_heldout(prompts[::-1], 10, seed)[1]} == {p.text for p in held}
    assert split_heldout(prompts, 10, 0)[1] != split_heldout(prompts, 10, 1)[1]
    assert split_heldout(prompts, 0, 0) == (prompts, [])
    assert len(split_heldout(prompts, 29, 0)[0]) >= 3


@pytest.mark.parametrize("heldout", [2, 3])
def test_heldout_must_leave_something(tmp_path, heldout):
    prompts = load(write_jsonl(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}))
    with pytest.raises(PromptError, match=f"prompts.heldout = {heldout}, but the source has 2 distinct"):
        split_heldout(prompts, heldout, 0)
