"""A reward worker's two calls: a part of a stage, and a part of an evaluation."""

from itertools import pairwise

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from infra.object_store import LocalObjectStore
from infra.settings import shell_environment
from rlhf_core.actors.jobs import EvaluateJob, ScoreJob
from rlhf_core.actors.reward_actor import RewardActor
from rlhf_core.buffer import read_shard
from rlhf_core.config.data import RewardConfig, RewardFunctionConfig
from rlhf_core.metrics import merge_metrics, values
from rlhf_core.rewards.host import Conditions
from tests.fixtures.whole_run import GROUPS, SAMPLES, Run

ROWS = GROUPS * SAMPLES
PLAN = 2
SOURCE = """
from rlhf_core.rewards.contract import RewardResult

def judge(*, completions, completion_ids, **_):
    return [float("<plan>" in text) + len(ids) for text, ids in zip(completions, completion_ids, strict=True)]

def silent(*, completions, **_):
    return [None] * len(completions)

def refuses(*, completions, **_):
    return [RewardResult(status="invalid_data", error="no") for _ in completions]
"""


@pytest.fixture
def run(tmp_path):
    found = Run(LocalObjectStore(tmp_path / "store")).start()
    found.generate(0)
    return found


@pytest.fixture
def actor(tmp_path, run):
    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(100) if n != PLAN} | {"<plan>": PLAN}, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken("<plan>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = RewardActor("reward-0", str(tmp_path), run.store)
    made.claim(1)
    yield made
    made.close()


@pytest.fixture
def setting(tmp_path):
    """Function: names of functions, settings -> the configuration and the conditions."""
    (tmp_path / "rewards.py").write_text(SOURCE)

    def make(*names, **settings):
        functions = tuple(RewardFunctionConfig(function=f"{tmp_path}/rewards.py:{name}") for name in names)
        return RewardConfig(functions=functions, **settings), Conditions(str(tmp_path), shell_environment(()))

    return make


def score(actor, run, rows, reward, conditions):
    job = ScoreJob(
        run="r",
        iteration=0,
        attempt="a1",
        prompts=run.lineage.record.prompts.train,
        rollouts=run.lineage.load(run.store, 0, "generate"),
        rows=rows,
        reward=reward,
        conditions=conditions,
    )
    return actor.score(1, job)


@pytest.mark.parametrize("special", [False, True])
def test_text_is_scored_and_stored_with_special_tokens_or_without(actor, run, setting, special):
    result = score(actor, run, range(ROWS), *setting("judge", special_tokens=special))
    table = read_shard(run.store, result.shards[0])
    ids = [r["response_ids"] for r in run_rows(run)]
    assert table["component/judge"].to_pylist() == [float(special and PLAN in t) + len(t) for t in ids]
    texts = table["response_text"].to_pylist()
    assert any("<plan>" in text for text in texts) == special
    assert "t1 " in " ".join(texts)
    assert "" in texts, "one response is empty"


def run_rows(run):
    manifest = run.lineage.load(run.store, 0, "generate")
    return [row for shard in manifest.shards for row in read_shard(run.store, shard).to_pylist()]


def test_parts_give_the_whole(actor, run, setting):
    whole = score(actor, run, range(ROWS), *setting("judge", "silent"))
    parts = [score(actor, run, rows, *setting("judge", "silent")) for rows in (range(5), range(5, ROWS))]
    tables = [
        pa.concat_tables(read_shard(run.store, s) for r in results for s in r.shards) for results in ([whole], parts)
    ]
    assert tables[0].equals(tables[1])
    assert values(merge_metrics(p.metrics for p in parts)) == pytest.approx(values(whole.metrics))
    assert set(tables[0]["status"].to_pylist()) == {"ok"}
    assert set(tables[0]["component/silent"].to_pylist()) == {None}


@pytest.mark.parametrize(
    ("name", "error"), [("refuses", "refuses: no"), ("silent", "no reward function had anything to say")]
)
def test_nothing_scored_has_no_mean(actor, run, setting, name, error):
    result = score(actor, run, range(ROWS), *setting(name))
    table = read_shard(run.store, result.shards[0])
    assert set(table["status"].to_pylist()) == {"invalid_data"}
    assert set(table["error"].to_pylist()) == {error}
    assert values(result.metrics) == {"reward/failed_infra": 0.0, "reward/invalid_data": float(ROWS)}


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_an_evaluation_in_parts(actor, run, setting, workers):
    heldout = run.lineage.record.prompts.heldout
    tables = [
        pa.table(
            {
                "prompt_id": pa.array(prompts, pa.string()),
                "response_ids": pa.array([[3] * n for n in lengths], pa.list_(pa.int32())),
                "finish_reason": pa.array(["stop"] * len(prompts), pa.string()),
            }
        )
        for prompts, lengths in ((["p00", "p00"], [1, 2]), ([], []), (["p01", "p01"], [3, 4]))
    ]
    edges = [4 * n // workers for n in range(workers + 1)]
    scored = [
        actor.score_tables(1, EvaluateJob(heldout, range(a, b), *setting("judge")), *tables) for a, b in pairwise(edges)
    ]
    metrics = values(merge_metrics(part["metrics"] for part in scored))
    assert metrics["reward/mean"] == 2.5
    samples = [sample for part in scored for sample in part["samples"]]
    assert [s["reward"] for s in samples] == [1.0, 2.0, 3.0, 4.0]
    assert [s["prompt"] for s in samples] == ["What is 0?"] * 2 + ["What is 1?"] * 2
