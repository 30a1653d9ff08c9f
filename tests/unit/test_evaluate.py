"""Dividing an evaluation among engines and reward workers, with the real actors in this process around a made-up engine."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import tasks.evaluate
from infra.object_store import LocalObjectStore
from rlhf_core.actors import rollout_actor
from rlhf_core.actors.reward_actor import RewardActor
from rlhf_core.config import parse_config
from rlhf_core.engines.vllm_engine import FinishedGroup, Sampling
from rlhf_core.metrics import merge_metrics, values
from rlhf_core.prompts.table import PromptTable, write_prompts
from tests.fixtures.whole_run import CONFIG, Run


class MadeUpEngine:
    """Draws tokens from the seed of each sample, or for greedy from the prompt's ids; groups finish in reverse order."""

    def __init__(self, settings, progress):
        self.version = 0

    def generate(self, prompts, sampling, version, seeds):
        assert [len(own) for own in seeds] == [sampling.samples] * len(prompts)
        for index in reversed(range(len(prompts))):
            drawn = seeds[index] if sampling.temperature else [sum(prompts[index])]
            yield FinishedGroup(index, [[n % 7, n % 5] for n in drawn], [], ["stop"] * sampling.samples, 0.1)


class Handle:
    """Calls as to a Ray actor, answered at once."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, method):
        return SimpleNamespace(remote=getattr(self._actor, method))


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Function: (engines, reward workers, sampling, seed) -> what the workers answered."""
    monkeypatch.setattr(rollout_actor, "VllmEngine", MadeUpEngine)
    monkeypatch.setattr(tasks.evaluate, "gather", lambda calls, *_: list(calls))
    store = LocalObjectStore(tmp_path / "store")
    record = Run(store).start().lineage.record
    heldout = write_prompts(store, "r", "five", PromptTable(store, record.prompts.train)._table.slice(0, 5))
    Tokenizer(WordLevel({str(n): n for n in range(7)}, unk_token="0")).save(str(tmp_path / "tokenizer.json"))
    made = []

    def run(engines, workers, sampling, seed=5):
        rollout = [rollout_actor.RolloutActor(f"e{n}", None, store, None) for n in range(engines)]
        reward = [RewardActor(f"r{n}", str(tmp_path), store) for n in range(workers)]
        made.extend(reward)
        context = SimpleNamespace(
            config=parse_config({**CONFIG, "seed": seed}),
            cluster=SimpleNamespace(epoch=0, engines=range(engines), rewards=range(workers)),
            engines=SimpleNamespace(handles=[Handle(actor) for actor in rollout], watch=lambda beside: None),
            rewards=SimpleNamespace(handles=[Handle(actor) for actor in reward]),
            deadline=60.0,
        )
        return tasks.evaluate._sample_and_score(context, heldout, 3, sampling)

    yield run
    for actor in made:
        actor.close()


SAMPLED, GREEDY = Sampling(2, 8, 1.0, logprobs=False), Sampling(1, 8, 0.0, logprobs=False)


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_the_result_does_not_depend_on_how_many_share_it(evaluated, sampling):
    one = evaluated(1, 1, sampling)
    samples = [sample for part in one for sample in part["samples"]]
    assert [s["prompt"] for s in samples] == [f"What is {n}?" for n in range(5) for _ in range(sampling.samples)][:8]
    for engines, workers in ((2, 1), (1, 2), (3, 2), (6, 7)):
        parts = evaluated(engines, workers, sampling)
        assert len(parts) == workers
        assert [sample for part in parts for sample in part["samples"]][:8] == samples
        merged = [values(merge_metrics(part["metrics"] for part in given)) for given in (parts, one)]
        assert merged[0] == pytest.approx(merged[1])


def test_prompts_have_seeds_of_their_own(evaluated):
    responses = [[s["response"] for part in evaluated(1, 1, SAMPLED, seed) for s in part["samples"]] for seed in (5, 6)]
    assert responses[0] != responses[1]
    assert len(set(responses[0])) > 4
