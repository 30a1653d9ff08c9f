"""Whether a rank repeats an update, and what it says that this depends on: real ranks over gloo."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_the_self_test_leaves_the_state_as_it_was(request, tiny_model, make_experience, ranks):
    experience = make_experience()
    with request.getfixturevalue(ranks).engine(tiny_model, learning_rate=1e-3) as tested:
        start = tested.digest()
        found = tested.each("self_test", [()] * tested.ranks.world)
        assert all(result.exact and not result.reason for result in found)
        assert tested.digest() == start
        tested.update(experience)
        after = tested.digest()
        assert all(result.exact for result in tested.each("self_test", [()] * tested.ranks.world))  # with moments, too
        assert tested.digest() == after
        tested.update(experience, iteration=1)
        last = tested.digest()
    with request.getfixturevalue(ranks).engine(tiny_model, learning_rate=1e-3) as plain:
        plain.update(experience)
        plain.update(experience, iteration=1)
        assert plain.digest() == last


def test_ranks_agree_about_their_environment(two_ranks, tiny_model):
    with two_ranks.engine(tiny_model) as engine:
        one, other = (environment for environment, _ in engine.outcomes("get", "environment"))
    assert one == other
    assert one["ranks"] == 2
    assert len(one["processors"]) == 2
    assert one["deterministic"]
