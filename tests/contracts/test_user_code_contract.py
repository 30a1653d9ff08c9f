"""User code meets the same conditions in the trial before a run and in a reward worker: one suite for both."""

import os

import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from infra.object_store import LocalObjectStore
from infra.settings import shell_environment
from rlhf_core.actors.jobs import EvaluateJob
from rlhf_core.actors.reward_actor import RewardActor
from rlhf_core.config.data import RewardConfig, RewardFunctionConfig
from rlhf_core.errors import RewardError
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.table import write_prompts
from rlhf_core.rewards import scorer
from rlhf_core.rewards.host import Conditions
from rlhf_core.rewards.trial import try_reward

ANSWERS = ("55", "7")
PROMPTS = [Prompt(f"p{n}", f"question {n}", answer=answer, metadata={"n": n}) for n, answer in enumerate(ANSWERS)]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(WordLevel({"55": 0, "7": 1}, unk_token="7"))
    assert tokenizer.add_special_tokens(["<end>"]) == 1
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def conditions(tmp_path, monkeypatch):
    """Function: names of variables -> the conditions."""
    monkeypatch.setenv("JUDGE_LIMIT", "20")
    folder = tmp_path / "folder"
    folder.mkdir()

    def make(*names):
        environment = shell_environment(names)
        return Conditions(str(folder), environment, frozenset(os.environ.keys() - environment.keys()))

    return make


@pytest.fixture
def worker(tmp_path, tokenizer_folder):
    """Function: (configuration, conditions, epoch, token ids) -> rewards of an actor of its own."""
    store = LocalObjectStore(tmp_path / "store")
    table = pa.table(
        {
            "prompt_id": [p.prompt_id for p in PROMPTS],
            "prompt_text": [p.text for p in PROMPTS],
            "prompt_ids": pa.array([[1]] * 2, pa.list_(pa.int32())),
            "answer": [p.answer for p in PROMPTS],
            "metadata": ['{"n": 0}', '{"n": 1}'],
        }
    )
    prompts, actor = write_prompts(store, "r", "train", table), RewardActor("reward-0", str(tokenizer_folder), store)
    encode = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode_batch

    def score(config, conditions, epoch=1, ids=None):
        actor.claim(epoch)
        columns = {
            "prompt_id": [p.prompt_id for p in PROMPTS],
            "response_ids": pa.array(ids or [e.ids for e in encode(list(ANSWERS))], pa.list_(pa.int32())),
            "finish_reason": ["stop", "stop"],
        }
        job = EvaluateJob(prompts, range(2), config, conditions)
        scored = actor.score_tables(epoch, job, pa.table(columns).slice(0, 1), pa.table(columns).slice(1))
        return [sample["reward"] for sample in scored["samples"]]

    yield score
    actor.close()


@pytest.fixture(params=["trial", "worker"])
def ask(request, tmp_path, monkeypatch, conditions, tokenizer_folder):
    """Function: source of a file, "function" ..., names of variables, settings -> rewards of the two prompts, whose answers are
    the completions."""
    monkeypatch.setattr(scorer, "_PAUSE_SECONDS", 0.0)
    score = request.getfixturevalue("worker") if request.param == "worker" else None

    def run(source, *functions, variables=(), **settings):
        (tmp_path / "rewards.py").write_text(source)
        named = tuple(
            RewardFunctionConfig(function=f"{tmp_path}/rewards.py:{name}") for name in functions or ("score",)
        )
        config = RewardConfig(functions=named, **settings)
        if score is not None:
            return score(config, conditions(*variables))
        return try_reward(config, conditions(*variables), PROMPTS, lambda: tokenizer_folder).rewards

    return run


def test_one_event_loop_for_all_calls(ask):
    source = """
import asyncio
LIMIT = asyncio.Semaphore(1)
LOOPS = set()
async def one(text):
    async with LIMIT:  # waiting for it binds it to the loop
        await asyncio.sleep(0)
        return len(text)
async def score(*, completions, **_):
    LOOPS.add(asyncio.get_running_loop())
    await asyncio.gather(*(one(text) for text in "abc"))
    return [float(await one(text)) + len(LOOPS) for text in completions]
"""
    assert ask(source, batch_size=1) == [3.0, 2.0]


def test_a_connection_that_is_kept(ask):
    source = """
import asyncio
KEPT = []
async def answer(reader, writer):
    while line := await reader.readline():
        writer.write(b"%d\\n" % len(line))
        await writer.drain()
async def score(*, completions, **_):
    if not KEPT:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        KEPT.extend([*await asyncio.open_connection(*server.sockets[0].getsockname()), server])
    reader, writer, _ = KEPT
    rewards = []
    for text in completions:
        writer.write(text.encode() + b"\\n")
        rewards.append(float(await reader.readline()))
    return rewards
"""
    assert ask(source, batch_size=1) == [3.0, 2.0]


def test_functions_that_run_a_loop_of_their_own(ask):
    source = """
import asyncio
async def one():
    return 1.0
def score(*, completions, **_):
    return [asyncio.run(one()) for _ in completions]
async def later(*, completions, **_):
    return [await one() for _ in completions]
def old(*, completions, **_):
    return [asyncio.get_event_loop().run_until_complete(one()) for _ in completions]
"""
    assert ask(source, "score", "later", "old", batch_size=1) == [3.0, 3.0]


def test_the_main_thread_of_a_process_that_is_not_ours(ask):
    source = f"""
import os, signal, threading
def score(*, completions, **_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # raises outside the main thread
    assert threading.current_thread() is threading.main_thread()
    return [float(os.getpid() != {os.getpid()}) for _ in completions]
"""
    assert ask(source) == [1.0, 1.0]


def test_the_folder_and_the_files_beside(ask, tmp_path):
    (tmp_path / "grading.py").write_text("def share(text):\n    return float(len(text))\n")
    source = """
import pathlib
from grading import share
def score(*, completions, **_):
    pathlib.Path("here").touch()
    return [share(text) for text in completions]
"""
    assert ask(source) == [2.0, 1.0]
    assert (tmp_path / "folder" / "here").exists()


def test_variables_travel_where_they_are_named(ask):
    source = (
        "import os\ndef score(*, completions, **_):\n    return [float(os.environ['JUDGE_LIMIT'])] * len(completions)\n"
    )
    assert ask(source, variables=["JUDGE_LIMIT"]) == [20.0, 20.0]
    with pytest.raises(RewardError, match=r"KeyError: 'JUDGE_LIMIT' .* reward.environment = \[\"JUDGE_LIMIT\"\]"):
        ask(f"{source}# again\n")


def test_no_gpu_is_seen(ask):
    source = (
        "import os\ndef score(*, completions, **_):\n    return [float(not os.environ['CUDA_VISIBLE_DEVICES'])] * 2\n"
    )
    assert ask(source) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit('no key')", r"raised SystemExit: no key \(rewards.py, line 3\)"),
        ("exit(3)", r"raised SystemExit: 3 \(rewards.py, line 3\)"),
        ("raise KeyboardInterrupt", r"raised KeyboardInterrupt:  \(rewards.py, line 3\)"),
        ("os._exit(0)", r"ended its process \(exit code 0\)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"ended its process \(SIGSEGV\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"ended its process \(SIGKILL, as when memory runs out\)"),
        ("os.fork() or time.sleep(1000); os._exit(3)", r"ended its process \(exit code 3\)"),
        ("raise ValueError('late')", r"raised ValueError: late \(rewards.py, line 3\)"),
    ],
    ids=["exit", "exit of site", "interrupt", "os._exit", "segfault", "killed", "children left", "error"],
)
def test_what_ends_a_function_is_its_error(ask, body, words):
    source = f"import os, signal, sys, time\ndef score(*, completions, **_):\n    {body}\n"
    with pytest.raises(RewardError, match=f"reward function 'score' {words} on 2 rows"):
        ask(source)


@pytest.mark.parametrize("where", ["call", "import"])
def test_a_hang_ends_at_the_deadline(ask, where):
    wait = "import socket\nPAIR = socket.socketpair()\n"
    body = (
        f"{wait}def score(*, completions, **_):\n    PAIR[0].recv(1)\n"
        if where == "call"
        else f"{wait}PAIR[0].recv(1)\n"
    )
    with pytest.raises(RewardError, match=r"'score' gave no answer within 2 s \(reward.timeout_seconds\)") as caught:
        ask(body, timeout_seconds=2)
    assert ("2 rows, samples" if where == "call" else "rewards.py:score' was imported") in str(caught.value)


def test_what_a_function_prints_disturbs_nothing(ask, capfd):
    source = "def score(*, completions, **_):\n    print('from the judge')\n    return [1.0] * len(completions)\n"
    assert ask(source) == [1.0, 1.0]
    assert capfd.readouterr().out == "from the judge\n"


def test_nothing_to_say_about_a_row(ask):
    source = """
def first(*, completions, **_):
    return [1.0, None]
def second(*, completions, **_):
    return [None, 2.0]
"""
    assert ask(source, "first", "second") == [1.0, 2.0]


def test_token_ids_for_functions_that_ask(ask, tokenizer_folder):
    ids = [e.ids for e in Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode_batch(list(ANSWERS))]
    source = f"""
def score(*, completions, completion_ids, finish_reasons, **_):
    assert completion_ids == {ids}, completion_ids
    assert finish_reasons == ["stop", "stop"]
    return [1.0, 1.0]
"""
    assert ask(source) == [1.0, 1.0]


def test_a_server_that_fails_once_is_asked_again(ask):
    source = """
from rlhf_core.rewards.contract import RewardResult
CALLS = []
def score(*, completions, **_):
    CALLS.append(1)
    return [RewardResult(status="failed_infra", error="busy") if len(CALLS) < 3 else 1.0 for _ in completions]
"""
    assert ask(source) == [1.0, 1.0]


# What only a worker does: it lives on from command to command


def test_a_worker_starts_anew_for_another_driver_and_for_changed_files(worker, conditions, tmp_path):
    (tmp_path / "beside.py").write_text("ADD = 0\n")
    (tmp_path / "a.py").write_text("import os, beside\ndef score(**_):\n    return [float(os.getpid()), beside.ADD]\n")
    config = RewardConfig(functions=(RewardFunctionConfig(function=f"{tmp_path}/a.py:score"),))
    first = worker(config, conditions())
    assert worker(config, conditions()) == first, "kept from call to call"
    assert worker(config, conditions("JUDGE_LIMIT"))[0] != first[0]
    again = worker(config, conditions(), epoch=2)
    assert again[0] != first[0]
    (tmp_path / "beside.py").write_text("ADD = 1\n")  # as long as before, and in the same second
    changed = worker(config, conditions(), epoch=2)
    assert changed[0] != again[0]
    assert changed[1] == 1.0


def test_special_tokens_are_handed_on_if_wished(worker, conditions, tmp_path):
    (tmp_path / "a.py").write_text(
        "def score(*, completions, **_):\n    return [float('<end>' in c) for c in completions]\n"
    )
    functions = (RewardFunctionConfig(function=f"{tmp_path}/a.py:score"),)
    ids = [[0, 2], [1, 2]]
    assert worker(RewardConfig(functions=functions), conditions(), ids=ids) == [0.0, 0.0]
    assert worker(RewardConfig(functions=functions, special_tokens=True), conditions(), ids=ids) == [1.0, 1.0]
