"""Batches that teach nothing: what is said of them, and when the run stops."""

from __future__ import annotations

import logging

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core.config import parse_config
from rlhf_core.errors import NumericsError, RewardError
from rlhf_core.guards import NO_GRADIENT, lesson, lessons
from rlhf_core.manifests import ClusterRef
from tasks.context import StageContext
from tasks.unlearned import require_gradient, require_scores
from tests.fixtures.whole_run import CONFIG, GROUPS, SAMPLES, Batch, Run, lengths_of

ROWS = GROUPS * SAMPLES
UNSCORED = {"reward/failed_infra": 0.0, "reward/invalid_data": float(ROWS)}
EQUAL = {"reward/mean": 1.0, "reward/std": 0.0, "reward/failed_infra": 0.0, "reward/invalid_data": 0.0}
IDLE = {"update/seconds": 1.0, "update/skipped_steps": 1.0}
STEPPED = {"update/seconds": 1.0, "update/steps": 1.0, "update/skipped_steps": 1.0}


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def log(monkeypatch, caplog):
    """The log of the task."""
    monkeypatch.setattr("tasks.unlearned.get_run_logger", lambda: logging.getLogger("run"))
    return caplog


def context(store, iteration, kl_coef=0.0, **guards):
    raw = {**CONFIG, "guards": guards, "algorithm": {"kl_coef": kl_coef}, "storage": {"url": store.url}}
    cluster = ClusterRef(namespace="none", branch="r", epoch=1, trainers=(), engines=(), rewards=())
    return StageContext(parse_config(raw), cluster, iteration, attempt="a1")


class Written(Run):
    """Whose stages have metrics, of each iteration those in ``scores`` and ``updates``."""

    scores = updates = ()

    def score(self, iteration, **_) -> None:
        super().score(iteration, metrics=self.scores[iteration])

    def advantages(self, iteration, **_) -> None:
        lengths = self.batch(iteration).lengths
        values = [0.0] * len(lengths)
        super().advantages(iteration, values=values)

    def update(self, iteration, **_) -> None:
        super().update(iteration, learned=self.updates[iteration])


def prepared(store, scores, updates, reward=None):
    """A run before the update of its last iteration."""
    status = "invalid_data" if reward is None else "ok"
    run = Written(store, batch=lambda k: Batch(lengths_of(k), [reward] * ROWS, [status] * ROWS))
    run.scores, run.updates = scores, updates
    run.start().iterations(*range(len(scores) - 1))
    run.stages(len(scores) - 1, "generate", "score")
    return run


def with_advantages(run, iteration, fraction):
    run.manifest(iteration, "advantages", (), ["generate", "score"], metrics={"advantages/learning_fraction": fraction})
    return run


def test_batches_without_any_score_stop_the_run_before_their_rewards_are_committed(store, log):
    run = prepared(store, [EQUAL, UNSCORED, UNSCORED], [STEPPED, IDLE])
    rewards = run.lineage.load(store, 2, "score")
    uncommitted = rewards.model_copy(update={"rows": 0})
    with pytest.raises(
        RewardError, match=r"iteration 2: nothing was scored \(12 invalid_data\); the first reason: broken"
    ):
        require_scores(context(store, 2, unscored_in_a_row=2), uncommitted)
    with pytest.raises(RewardError, match=r"number 1 in a row \(guards\.unscored_in_a_row\)"):
        require_scores(context(store, 2, unscored_in_a_row=1), uncommitted)
    for bound in (0, 3, 4):
        require_scores(context(store, 2, unscored_in_a_row=bound), uncommitted)
    assert log.text.count("iteration 2: nothing was scored (12 invalid_data); the first reason: broken") == 3
    require_scores(context(store, 0, unscored_in_a_row=1), run.lineage.load(store, 0, "score"))


def test_batches_without_any_gradient_stop_the_run_after_a_bound(store, log):
    run = prepared(store, [EQUAL, EQUAL, EQUAL], [STEPPED, IDLE], reward=1.0)
    with_advantages(run, 2, 0.0)
    with pytest.raises(
        NumericsError, match=r"iteration 2: no row had a gradient.*mean reward is 1\. That is number 2"
    ) as failed:
        require_gradient(context(store, 2, unlearned_in_a_row=2))
    assert "--set iterations=2" in str(failed.value)
    for bound in (0, 3):
        require_gradient(context(store, 2, unlearned_in_a_row=bound))
    assert log.text.count("the mean reward is 1: the weights stay as they are") == 2
    require_gradient(context(store, 2, unlearned_in_a_row=1, kl_coef=0.1))  # the KL term has a gradient


def test_a_batch_without_any_score_has_no_gradient_whatever_the_loss(store):
    run = with_advantages(prepared(store, [UNSCORED], []), 0, 0.0)
    assert run.lineage.head == "r"
    with pytest.raises(NumericsError, match="iteration 0: nothing was scored"):
        require_gradient(context(store, 0, unlearned_in_a_row=1, kl_coef=0.1))


def test_a_batch_that_teaches_something_is_not_mentioned(store, log):
    with_advantages(prepared(store, [EQUAL], [], reward=0.5), 0, 0.25)
    require_gradient(context(store, 0, unlearned_in_a_row=1))
    assert log.text == ""


def test_what_an_iteration_taught():
    assert lesson({}) is None
    assert lesson({"reward/mean": 0.0, "reward/invalid_data": 3.0}) is None
    assert lesson(UNSCORED | {"reward/failed_infra": 2.0}) == "nothing was scored (2 failed_infra, 12 invalid_data)"
    assert lesson(EQUAL | IDLE) == NO_GRADIENT
    assert lesson(EQUAL | STEPPED) is None
    assert lesson(EQUAL | {"update/seconds": 1.0}) == "left out by a guard"


def test_what_a_run_learned_from():
    assert lessons([]) is None
    assert lessons([EQUAL | STEPPED] * 3) is None
    idle, unscored = EQUAL | IDLE, UNSCORED | IDLE
    assert lessons([idle, idle]) == f"0 of 2 iterations (2: {NO_GRADIENT})"
    assert lessons([EQUAL | STEPPED, idle, unscored, idle]) == (
        f"1 of 4 iterations, none of the last 3 (2: {NO_GRADIENT}; 1: nothing was scored)"
    )
    assert lessons([idle, EQUAL | STEPPED]) == f"1 of 2 iterations (1: {NO_GRADIENT})"
