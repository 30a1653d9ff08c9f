"""Trainer and engine, each as it is, agree about logprobs after a sync, and the comparison notices a sync left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_core.engines.rows import TokenRows
from rlhf_core.engines.vllm_engine import Sampling
from rlhf_core.errors import IntegrityError

TOLERANCE = 1e-4  # the default of sync.tolerance for float32
RATE = 5e-3


@pytest.fixture(scope="module")
def trainer(two_ranks, tiny_model):
    with two_ranks.engine(tiny_model, learning_rate=RATE) as engine:
        yield engine


def transfer(trainer, engine, version, max_bytes):
    """The trainer's weights into the engine, as buckets of at most ``max_bytes``; returns the digest."""
    digest = trainer.digest()
    engine.begin_update()
    for spec, flat in trainer.all("buckets", max_bytes)[0]:
        engine.load_bucket(spec, flat.numpy())
    return engine.finish_update(version, digest)


def disagreement(trainer, engine, tokens):
    """Mean absolute difference of the response tokens' logprobs at temperature 1, the engine asked for its own version."""
    sequences, starts = [], []
    for row in range(len(tokens.response_lengths)):
        prompt = tokens.prompt_values[slice(*tokens.prompt_offsets[row : row + 2].tolist())].tolist()
        response = tokens.response_values[slice(*tokens.response_offsets[row : row + 2].tolist())].tolist()
        sequences.append(prompt + response)
        starts.append(len(prompt) - 1)
    answers = engine.sequence_logprobs(sequences, engine.version)
    theirs = np.concatenate([answer[start:] for answer, start in zip(answers, starts, strict=True)])
    mine = trainer.logprobs(tokens)
    return float(np.abs(theirs - torch.cat([mine[row][0] for row in range(len(sequences))]).numpy()).mean())


def test_they_agree_after_every_sync_and_a_stale_engine_is_seen(trainer, vllm, make_experience):
    tokens = make_experience(7).tokens
    assert disagreement(trainer, vllm, tokens) < TOLERANCE, "both start from the same folder"
    for version, max_bytes in ((1, 150_000), (2, 1 << 30)):
        trainer.update(make_experience(version), version)
        stale = disagreement(trainer, vllm, tokens)  # the sync is still to come
        assert transfer(trainer, vllm, version, max_bytes) == trainer.digest()
        assert disagreement(trainer, vllm, tokens) < TOLERANCE
        assert stale > 100 * TOLERANCE


def test_behaviour_logprobs_are_those_of_the_trainer_at_the_sampling_temperature(
    trainer, vllm, ragged, make_experience
):
    trainer.update(make_experience(3), 3)
    transfer(trainer, vllm, 3, 1 << 22)
    prompts = [[5, 17, 900], [30_000], [8] * 20]
    groups = list(vllm.generate(prompts, Sampling(samples=4, max_new_tokens=12, temperature=0.7), version=3))
    parents = [prompts[group.index] for group in groups for _ in group.token_ids]
    responses = [tokens for group in groups for tokens in group.token_ids]
    tokens = TokenRows(*ragged(parents), *ragged(responses))
    mine = trainer.logprobs(tokens, temperature=0.7)
    theirs = torch.tensor([value for group in groups for logprobs in group.logprobs for value in logprobs])
    difference = (torch.cat([mine[row][0] for row in range(len(responses))]) - theirs).abs()
    assert float(difference.max()) < TOLERANCE


def test_weights_of_another_step_do_not_pass_for_this_one(trainer, vllm, make_experience):
    old = trainer.all("buckets", 1 << 30)[0]
    trainer.update(make_experience(4), 4)
    vllm.begin_update()
    for spec, flat in old:
        vllm.load_bucket(spec, flat.numpy())
    with pytest.raises(IntegrityError, match="policy version 4 did not arrive intact"):
        vllm.finish_update(4, trainer.digest())
