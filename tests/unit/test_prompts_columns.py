"""Columns inside columns, and columns that are not there."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import PromptError
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.source import load_prompts, missing_answers


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(source, **options):
    return load_prompts(PromptsConfig(source=str(source), **options), seed=0)


def test_prompt_and_answer_inside_other_columns(tmp_path):
    chat = [[{"role": "user", "content": f"Add {n} and 1."}] for n in range(3)]
    table = pa.table(
        {
            "input": [{"chat": messages, "level": n} for n, messages in enumerate(chat)],
            "judge": [{"style": "rule", "truth": {"value": v}} for v in (1, None, 3)],
        }
    )
    pq.write_table(table, tmp_path / "p.parquet")
    prompts = load(tmp_path / "p.parquet", prompt_column="input.chat", answer_column="judge.truth.value")
    assert [p.text for p in prompts] == ["Add 0 and 1.", "Add 1 and 1.", "Add 2 and 1."]
    assert [p.answer for p in prompts] == ["1", None, "3"]
    assert prompts[0].metadata["judge"] == {"style": "rule", "truth": {"value": 1}}


def test_a_column_of_that_very_name_goes_first(tmp_path):
    source = write(tmp_path / "p.jsonl", {"prompt": "a", "x.y": "flat", "x": {"y": "deep"}})
    assert load(source, answer_column="x.y")[0].answer == "flat"


def test_rows_without_the_answer_have_none(tmp_path):
    source = write(
        tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b", "key": {"v": 2}}, {"prompt": "c", "key": None}
    )
    assert [p.answer for p in load(source, answer_column="key.v")] == [None, "2", None]
    nothing = write(tmp_path / "q.jsonl", {"prompt": "a", "gold": None})
    assert load(nothing, answer_column="gold")[0].answer is None


@pytest.mark.parametrize("column", ["solutoin", "judge.trut", "truth", "judge.truth.deeper"])
def test_an_answer_column_that_is_not_there(tmp_path, column):
    row = {"prompt": "a", "solution": 1, "judge": {"truth": 2}}
    source = write(tmp_path / "p.jsonl", row, row)
    with pytest.raises(PromptError) as caught:
        load(source, answer_column=column)
    message = str(caught.value)
    assert f"prompts.answer_column = {column!r}" in message
    assert "'prompt', 'solution', 'judge', 'judge.truth'" in message
    assert f"did you mean {'solution' if column == 'solutoin' else 'judge.truth'!r}?" in message


def test_a_prompt_column_that_is_not_there(tmp_path):
    source = write(tmp_path / "p.jsonl", {"input": {"question": "a"}, "answer": 1})
    with pytest.raises(PromptError, match=r"line 1: no column 'question'.*did you mean 'input.question'"):
        load(source, prompt_column="question")


def test_what_is_no_answer_names_the_way_out(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "answer": [b"\x00"]}), tmp_path / "p.parquet")
    with pytest.raises(PromptError, match=r"row 1, column 'answer': bytes .*store it as text"):
        load(tmp_path / "p.parquet")


def test_rewards_that_find_no_answer_learn_the_columns():
    bare = [Prompt("a", "x", metadata={"solution": "4"})]
    message = missing_answers(PromptsConfig(), bare)
    assert "prompts.answer_column = 'answer'" in message
    assert "'solution'" in message
    assert missing_answers(PromptsConfig(), [*bare, Prompt("b", "y", answer="1")]) == ""
