"""Files of prompts: compressed ones, arrays, folders, patterns, configurations, and numbers that are too large."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import PromptError
from rlhf_core.prompts.source import load_prompts


def lines(*texts):
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts).encode()


def load(source, **options):
    return load_prompts(PromptsConfig(source=str(source), **options), seed=0)


def texts(source, **options):
    return [prompt.text for prompt in load(source, **options)]


def refused(source, *parts, **options):
    with pytest.raises(PromptError) as caught:
        load(source, **options)
    for part in parts:
        assert part in str(caught.value)


def parquet(path, *prompts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": list(prompts)}), path)


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 4301, str(2**1024), "1e400", "-1.5e999"])
@pytest.mark.parametrize("row", ['{"prompt": "b", "answer": %s}', '{"prompt": "b", "note": {"deep": [1, %s]}}'])
def test_numbers_that_no_float_holds_name_their_line(tmp_path, row, number):
    good = '{"prompt": "a", "answer": 1}'
    (tmp_path / "p.jsonl").write_text(f"{good}\n\n{row % number}\n")
    refused(tmp_path / "p.jsonl", "line 3", f"the number {number[:12]}"[:20], "write it as text")
    (tmp_path / "p.json").write_text(f"[{good}, {row % number}]")
    refused(tmp_path / "p.json", "p.json", "write it as text")


def test_large_numbers_that_a_float_holds_stay_exact(tmp_path):
    number = 7 * 10**307 + 1
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "answer": {number}, "note": {number}}}\n')
    (prompt,) = load(tmp_path / "p.jsonl")
    assert (prompt.answer, prompt.metadata) == (str(number), {"note": number})


@pytest.mark.parametrize("value", ["Infinity", "-Infinity"])
def test_infinite_answers_name_their_line(tmp_path, value):
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "answer": {value}}}\n')
    refused(tmp_path / "p.jsonl", "line 2", "'answer'", "inf")


@pytest.mark.parametrize("depth", [5000, 200_000])
@pytest.mark.parametrize("column", ["prompt", "answer", "note", "tools"])
def test_values_that_are_nested_too_deeply_name_their_line(tmp_path, depth, column):
    deep = f'"{column}": {"[" * depth}{"]" * depth}'
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", {deep}}}\n')
    refused(tmp_path / "p.jsonl", "line 2")


def test_lines_of_all_kinds(tmp_path):
    first = {"prompt": "1?\u2028Now.", "answer": 5}
    second = {"prompt": "2?\u0085Go.", "answer": 7.0, "note": None}
    third = {"prompt": "3?\x0b\r\nSay. \U0001f34e", "tags": [None, {"a": None}]}
    body = "\r\n".join(["", *(json.dumps(row, ensure_ascii=False) for row in (first, second)), "  ", json.dumps(third)])
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + body.encode())  # and no line end behind the last
    prompts = load(tmp_path / "p.jsonl")
    assert [p.text for p in prompts] == [row["prompt"] for row in (first, second, third)]
    assert [p.answer for p in prompts] == ["5", "7", None]
    assert [p.metadata for p in prompts] == [{}, {"note": None}, {"tags": [None, {"a": None}]}]


def test_compressed_lines(tmp_path):
    whole = lines("a", "b", "c")
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(lines("a")) + gzip.compress(lines("b", "c")))
    zstd = pa.Codec("zstd")
    (tmp_path / "p.jsonl.zst").write_bytes(b"".join(zstd.compress(lines(t)).to_pybytes() for t in "abc"))
    (tmp_path / "p.json.zst").write_bytes(zstd.compress(b"[" + whole.strip().replace(b"\n", b",") + b"]").to_pybytes())
    for name in ("p.jsonl.gz", "p.jsonl.zst", "p.json.zst"):
        assert texts(tmp_path / name) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.jsonl.zst"])
def test_compressed_files_that_are_damaged(tmp_path, name):
    (tmp_path / name).write_bytes(lines("a"))
    refused(tmp_path / name, name, "cannot be read")
    data = lines(*(f"{n}" for n in range(5000)))
    packed = gzip.compress(data) if name.endswith("gz") else pa.Codec("zstd").compress(data).to_pybytes()
    (tmp_path / name).write_bytes(packed[:-20])
    refused(tmp_path / name, name, "cannot be read")


def test_json_is_an_array_or_lines(tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1).encode())
    assert texts(path) == ["a", "b"]
    path.write_bytes(lines("a", "b"))
    assert texts(path) == ["a", "b"]
    path.write_text('[{"prompt": "a"}, 5]')
    refused(path, "row 2", "int")
    path.write_text(json.dumps({"data": [{"prompt": "a"}]}, indent=1))
    refused(path, "line 1", "an array of objects, or one object a line")
    path.write_text('[{"prompt": "a"}')
    refused(path, "not JSON")


def test_a_folder_of_shards_in_the_order_of_their_names(tmp_path):
    for number in (2, 0, 1):
        parquet(tmp_path / "data" / f"train-{number:05d}-of-00003.parquet", f"{number}a", f"{number}b")
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", "held back")
    (tmp_path / "data" / "_SUCCESS").touch()
    everything = ["0a", "0b", "1a", "1b", "2a", "2b"]
    for source in (tmp_path, tmp_path / "data", tmp_path / "data" / "train-*.parquet", tmp_path / "**" / "train*"):
        assert texts(source) == everything
    assert texts(tmp_path, split="test") == ["held back"]
    refused(tmp_path, "prompts.split = 'valid'", "'train'", "'test'", split="valid")


def test_a_bad_row_of_many_files_names_its_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines("x", "y"))
    (tmp_path / "b.jsonl").write_bytes(lines("z", " "))
    refused(tmp_path, "b.jsonl, line 2", "empty")
    refused(tmp_path / "?.jsonl", "b.jsonl, line 2", "empty")
    parquet(tmp_path / "b.parquet", "")
    refused(tmp_path / "b.parq*", "b.parquet, row 1", "empty")


def test_patterns_that_cannot_be_used(tmp_path):
    refused(tmp_path / "*.jsonl", "matches no file")
    (tmp_path / "a.csv").write_text("prompt\na\n")
    refused(tmp_path / "*", "a.csv", ".parquet")
    refused(tmp_path, "no file that can be read")
    (tmp_path / "a[1].jsonl").write_bytes(lines("a"))
    assert texts(tmp_path / "a[1].jsonl") == ["a"]


def test_a_folder_of_several_kinds_is_not_read_in_part(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines("x"))
    (tmp_path / "b.jsonl").write_bytes(lines("y"))
    (tmp_path / "about.json").write_text("{}")
    parquet(tmp_path / ".cache" / "c.parquet", "z")
    refused(tmp_path, "about.json, line 1", "no column 'prompt'")
    (tmp_path / "about.json").unlink()
    assert texts(tmp_path) == ["x", "y"]
    parquet(tmp_path / "c.parquet", "z")
    refused(tmp_path, "several kinds", "c.parquet", "by a pattern")


def test_configurations_of_a_data_set(tmp_path):
    about = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("easy", "hard"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{about}---\n")
    for name in ("easy", "hard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_bytes(lines(name))
    assert texts(tmp_path, config="hard") == ["hard"]
    refused(tmp_path, "['easy', 'hard']", "prompts.config names the configuration")
    refused(tmp_path, "prompts.config = 'odd'", config="odd")
    refused(tmp_path / "easy" / "train.jsonl", "prompts.config = 'hard'", "is a file", config="hard")


def test_the_hub_is_asked_for_the_configuration(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    refused("openai/gsm8k", "prompts.config = 'main'", "no network", config="main", split="test")
    assert asked == [("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize("source", ["s3://bucket/p.jsonl", "hf://datasets/a/b", "https://host/p.parquet"])
def test_addresses_are_refused(source):
    refused(source, source, "copy the files to this machine")
