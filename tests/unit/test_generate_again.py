"""A generation that is cut off and done again: what was finished is kept, the rest is drawn again, and nothing is selected.

The engine is a stand-in that ends each response with the same probability at every token and finishes short ones first, as
real ones do; jobs, actor, segments and their taking over are the real ones.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from infra.object_store import LocalObjectStore
from rlhf_core.actors import rollout_actor
from rlhf_core.actors.rollout_actor import RolloutActor, Staging
from rlhf_core.buffer import read_shard
from rlhf_core.config import parse_config
from rlhf_core.engines.vllm_engine import FinishedGroup
from rlhf_core.manifests import PromptsManifest
from rlhf_core.prompts.order import prompt_rows
from rlhf_core.prompts.table import write_prompts
from rlhf_core.seeds import draw_seeds
from rlhf_core.segments import find_segments
from tasks.generate import _Gathered, _identity, _jobs

END, LIMIT, KILLS = 0, 60, 40


class Killed(Exception):
    """The engine's process has died."""


class StandIn:
    """Responses of geometric length. ``fresh``: draws from a generator of the process, as if streams did not matter."""

    def __init__(self, fresh: int | None = None) -> None:
        self.steps = LIMIT
        self.random = None if fresh is None else random.Random(fresh)

    def draw(self, stream, position):
        """A token, 0 .. 29."""
        if self.random is not None:
            return self.random.randrange(30)
        return int(draw_seeds(np.asarray([stream]), np.asarray([position]))[0]) % 30

    def generate(self, prompts, sampling, version, seeds, apart=False):
        running = {(group, sample): [] for group in range(len(prompts)) for sample in range(sampling.samples)}
        finished = {}
        for step in range(LIMIT):
            if step == self.steps:
                raise Killed
            for group, sample in list(running):
                tokens = running[group, sample]
                tokens.append(self.draw(seeds[group][sample], len(tokens)))
                if tokens[-1] == END or len(tokens) == LIMIT:
                    finished.setdefault(group, {})[sample] = running.pop((group, sample))
            for group in [g for g, samples in finished.items() if len(samples) == sampling.samples]:
                responses = [tokens for _, tokens in sorted(finished.pop(group).items())]
                reasons = ["stop" if tokens[-1] == END else "length" for tokens in responses]
                yield FinishedGroup(group, responses, [[-1.0] * len(t) for t in responses], reasons, 0.1)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Function: (iteration, kills, fresh) -> responses by (group, sample), after so many attempts that were killed."""
    monkeypatch.setattr(rollout_actor, "VllmEngine", lambda settings, progress: settings)
    store = LocalObjectStore(tmp_path / "store")
    config = parse_config(
        {
            "run": "r",
            "seed": 4501,
            "generate": {"prompts_per_iteration": 8, "samples_per_prompt": 2, "max_new_tokens": LIMIT},
        }
    )
    count = 40
    table = pa.table(
        {
            "prompt_id": [f"p{n}" for n in range(count)],
            "prompt_text": ["?"] * count,
            "prompt_ids": pa.array([[1, n] for n in range(count)], type=pa.list_(pa.int32())),
            "answer": [""] * count,
            "metadata": [""] * count,
        }
    )
    prompts = PromptsManifest(train=write_prompts(store, "r", "train", table))

    def run(iteration, kills, fresh=False):
        chance = random.Random(iteration)
        rows = prompt_rows(count, 8, iteration, config.seed)
        gathered = _Gathered()
        for attempt in range(kills + 1):
            context = SimpleNamespace(
                config=config,
                prompts=prompts,
                run=f"{fresh}{kills}",
                iteration=iteration,
                attempt=f"a{attempt}",
                store=store,
            )
            identity = _identity(context, rows)
            found = find_segments(store, context.run, iteration, identity)
            gathered = _Gathered([segment.shard for segment in found])
            # Another number of engines each time, so that groups change their engine and their company.
            for n, job in enumerate(_jobs(context, rows, gathered.missing(len(rows)), 1 + attempt % 2, identity)):
                engine = StandIn(chance.getrandbits(32) if fresh else None)
                engine.steps = LIMIT if attempt == kills else chance.randrange(10, LIMIT)
                actor = RolloutActor(f"e{n}", engine, store, Staging(tmp_path / f"s{n}", 1 << 30, 0.0))
                try:
                    gathered.shards += actor.generate(0, job).shards
                except Killed:
                    continue
        assert gathered.missing(len(rows)) == []
        found = [row for shard in gathered.shards for row in read_shard(store, shard).to_pylist()]
        return {(row["group"], row["sample"]): row["response_ids"] for row in found}

    return run


def test_kills_select_nothing(stage):
    undisturbed, killed, anew = (
        [stage(iteration, kills, fresh) for iteration in range(KILLS)]
        for kills, fresh in ((0, False), (2, False), (2, True))
    )
    assert killed == undisturbed
    # The same kills, with what was lost drawn anew, favour short responses: this test would see it.
    lengths, biased = ([len(r) for responses in part for r in responses.values()] for part in (killed, anew))
    assert np.mean(lengths) - np.mean(biased) > 4 * np.std(lengths) * np.sqrt(2 / len(lengths))
