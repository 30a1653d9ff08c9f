"""Bounds of a batch and its update, and what happens to a batch that is out of them."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.buffer import commit_stage
from rlhf_core.config import parse_config
from rlhf_core.config.guards import GuardsConfig
from rlhf_core.errors import ConfigError, NumericsError
from rlhf_core.guards import BATCH, UPDATE, not_finite, violations
from rlhf_core.manifests import ClusterRef, GuardRecord
from rlhf_core.records import commit_record
from tasks.context import StageContext
from tasks.stage import manifest_of
from tasks.update import update
from tests.fixtures.whole_run import CONFIG, Run

IN_A_ROW = ("skips_in_a_row", "unscored_in_a_row", "unlearned_in_a_row")
BOUNDS = [
    ("min_reward", "reward/mean", -1, BATCH),
    ("min_entropy", "policy/entropy", -1, BATCH),
    ("max_entropy", "policy/entropy", 1, BATCH),
    ("max_engine_gap", "mismatch/log_ratio_abs", 1, BATCH),
    ("max_kl", "policy/reference_kl", 1, UPDATE),
    ("max_grad_norm", "update/grad_norm_max", 1, UPDATE),
]


@pytest.mark.parametrize(("key", "metric", "side", "bounds"), BOUNDS)
def test_each_bound(key, metric, side, bounds):
    guards = GuardsConfig(**{key: 0.5})
    assert violations(guards, {metric: 0.5}, bounds) == []
    assert violations(guards, {metric: 0.5 - side * 0.1}, bounds) == []
    (found,) = violations(guards, {metric: 0.5 + side * 0.1, "another": -7.0}, bounds)
    assert found == f"{metric} = {0.5 + side * 0.1:.6g}: {'above' if side > 0 else 'below'} guards.{key} = 0.5"
    assert violations(GuardsConfig(), {metric: 1e30 * side}, bounds) == []
    assert violations(guards, {}, bounds) == []


def test_every_bound_of_the_configuration_is_looked_at():
    checked = {key for bounds in (BATCH, UPDATE) for keys in bounds.values() for key, _ in keys}
    assert checked == set(GuardsConfig.model_fields) - {"action", *IN_A_ROW}
    assert checked == {key for key, *_ in BOUNDS}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_out_of_bounds_without_any_bound(store, value):
    made = manifest_of(context(store, 3), "score", metrics={"reward/mean": value, "reward/std": 1.0}, policy_version=3)
    assert not_finite(made) == ["score: reward/mean is not a finite number"]
    assert made.metrics == {"reward/std": 1.0}
    assert not_finite(manifest_of(context(store, 3), "score", metrics={"reward/mean": 0.0}, policy_version=3)) == []


def test_a_bound_of_zero_is_a_bound():
    assert violations(GuardsConfig(min_reward=0.0), {"reward/mean": -1e-9}, BATCH)
    assert violations(GuardsConfig(min_reward=0.0), {"reward/mean": 0.0}, BATCH) == []
    assert violations(GuardsConfig(min_reward=-0.5), {"reward/mean": -0.4}, BATCH) == []


def test_all_violations_are_named():
    guards = GuardsConfig(min_reward=0.5, min_entropy=1.0, max_engine_gap=1.0)
    found = violations(guards, {"reward/mean": 0.1, "policy/entropy": 0.2, "mismatch/log_ratio_abs": 9.0}, BATCH)
    assert [line.split(" ")[0] for line in found] == ["reward/mean", "policy/entropy", "mismatch/log_ratio_abs"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_entropy": 2.0, "max_entropy": 1.0},
        {"min_entropy": 1.0, "max_entropy": 1.0},
        {"max_kl": 0.0},
        {"max_grad_norm": -1.0},
        {"action": "ignore"},
        *({key: -1} for key in IN_A_ROW),
    ],
)
def test_bounds_that_make_no_sense(wrong):
    with pytest.raises(ValidationError):
        GuardsConfig(**wrong)


def test_rules_of_the_configuration():
    with pytest.raises(ConfigError, match=r"guards\.min_entropy = 2\.0 is not below max_entropy = 1\.0"):
        parse_config({"guards": {"min_entropy": 2.0, "max_entropy": 1.0}})
    with pytest.raises(ConfigError, match=r"guards\.max_kl = 0\.1, but algorithm\.kl_coef = 0"):
        parse_config({"guards": {"max_kl": 0.1}})
    assert parse_config({"guards": {"max_kl": 0.1}, "algorithm": {"kl_coef": 0.01}}).guards.max_kl == 0.1
    assert parse_config({"guards": {"min_entropy": 0.0, "max_entropy": 1.0}}).guards.min_entropy == 0.0


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


def context(store, iteration, **guards):
    config = parse_config({**CONFIG, "guards": guards, "storage": {"url": store.url}})
    cluster = ClusterRef(namespace="none", branch="r", epoch=1, trainers=("r-trainer-0",), engines=(), rewards=())
    return StageContext(config, cluster, iteration, attempt="a1")


def work(context):
    """The work of the stage, without the task around it. It must not get as far as the ranks: there are none."""
    return update.__wrapped__(context)


def prepare(store, skipped=()):
    """A run before the update of iteration 3; the batch of that iteration has a mean reward of -1."""
    run = Run(store).start().iterations(0)
    for iteration in (1, 2):
        run.stages(iteration, "generate", "score", "advantages")
        run.update(iteration, skipped="out of bounds" if iteration in skipped else None)
        run.stages(iteration, "sync", "commit")
    run.generate(3)
    run.manifest(3, "score", (), ["generate"], metrics={"reward/mean": -1.0})
    run.manifest(3, "advantages", (), ["generate", "score"], metrics={"policy/entropy": 1.0})
    return run


def test_a_batch_that_is_out_of_bounds_stops_the_run_before_anything_is_committed(store):
    prepare(store)
    before = store.list("")
    with pytest.raises(NumericsError, match=r"iteration 3: reward/mean = -1: below guards\.min_reward = 0\.") as failed:
        work(context(store, 3, min_reward=0.0))
    assert "rlhf rollouts r 3" in str(failed.value)
    assert "guards.action=skip" in str(failed.value)
    assert store.list("") == before


@pytest.mark.parametrize("stage", ["score", "advantages"])
def test_a_batch_with_metrics_that_are_not_finite_is_committed_and_trips_the_guard(store, stage):
    prepare(store)
    store.delete([layout.stage_commit("r", 3, name) for name in ("score", "advantages")])
    first = {"score": "reward/mean", "advantages": "policy/entropy"}[stage]
    numbers = {first: math.nan, f"{first}_max": math.inf, "rows/count": 4.0}
    for name in ("score", "advantages"):
        metrics = numbers if name == stage else {}
        made = manifest_of(context(store, 3), name, metrics=metrics, policy_version=3)
        assert made.metrics == ({"rows/count": 4.0} if name == stage else {})
        commit_stage(store, made)
    with pytest.raises(NumericsError, match=f"iteration 3: {stage}: {first} is not a finite number; {stage}: "):
        work(context(store, 3))


def test_too_many_skipped_batches_in_a_row_stop_the_run(store):
    prepare(store, skipped=(1, 2))
    for most in (0, 1, 2):
        with pytest.raises(NumericsError, match=rf"The {most} batches before were left out too"):
            work(context(store, 3, min_reward=0.0, action="skip", skips_in_a_row=most))


def test_a_batch_that_was_rolled_back_is_not_applied_again(store):
    prepare(store)
    reason = "update/grad_norm = 1e+09: above guards.max_grad_norm = 1"
    commit_record(store, "runs/r/iterations/000003/GUARD.json", GuardRecord(run="r", iteration=3, reason=reason))
    with pytest.raises(NumericsError, match="update/grad_norm"):  # the batch itself is within its bounds
        work(context(store, 3))
