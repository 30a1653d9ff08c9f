"""What the metrics of several optimizer steps say, on one and two real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_core.algorithms.batching import minibatches
from rlhf_core.metric_names import meaning_of

#: The weights stay, so that each step is what it would be alone.
STILL = {"learning_rate": 1e-12}


def updated(ranks, model, experience, **changes):
    with ranks.engine(model, **STILL, **changes) as engine:
        return engine.update(experience)


def test_metrics_of_several_steps_are_those_of_the_steps(one_rank, two_ranks, tiny_model, make_experience):
    experience = make_experience(groups=4)
    lengths = experience.tokens.response_lengths
    group_of_token = torch.repeat_interleave(experience.groups, lengths)
    steep = torch.where(group_of_token == 0, 50.0, 1.0) * experience.advantages
    experience = replace(experience, advantages=steep)
    order = minibatches(4, 2, (0, 0, 0))
    parts = [experience.scored & torch.isin(experience.groups, torch.tensor(groups)) for groups in order]
    steps = [updated(one_rank, tiny_model, replace(experience, scored=part)) for part in parts]
    norms, losses = ([step[name] for step in steps] for name in ("update/grad_norm", "policy/loss"))
    assert max(norms) > 5 * min(norms)
    for ranks in (one_rank, two_ranks):
        metrics = updated(ranks, tiny_model, experience, updates_per_iteration=2)
        assert metrics["update/steps"] == 2
        assert metrics["update/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
        assert metrics["update/grad_norm_max"] == pytest.approx(max(norms), rel=1e-4)
        assert metrics["policy/loss"] == pytest.approx(sum(losses) / 2, rel=1e-3)
        assert metrics["policy/tokens"] == sum(step["policy/tokens"] for step in steps)
        assert metrics["update/entropy"] > 0
        assert {meaning_of(name).stage for name in metrics} == {"update"}
