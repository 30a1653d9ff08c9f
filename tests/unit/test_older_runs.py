"""Runs that older versions wrote, read and branched by this one. tests/e2e trains them on."""

from __future__ import annotations

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core.buffer import read_rows
from rlhf_core.lineage import load_lineage
from rlhf_core.manifests import STAGES
from rlhf_core.schema import DEPRECATED
from tasks import branching
from tasks.audit.run import audit_run
from tasks.preflight import check_before_start
from tasks.runs import describe_run, list_runs, load_config_of, sample_rollouts
from tests.fixtures.older_runs import ARCHIVES, unpack

STORE = ".rlhf/store"


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.partition(".")[0], autouse=True)
def store(request, tmp_path, monkeypatch):
    """The store, in the working folder that its runs were made in."""
    monkeypatch.chdir(unpack(request.param, tmp_path))
    return LocalObjectStore(STORE)


def contents(store):
    return {key: store.get(key) for key in store.list("") if "/lease/" not in key}


def test_runs_and_show():
    rows = {row.run: row for row in list_runs(STORE)}
    assert {run: (row.iterations_done, row.iterations, row.state) for run, row in rows.items()} == {
        "old": (4, 6, "started"),
        "forked": (2, 4, "started"),
    }
    view = describe_run(STORE, "old")
    assert view.next_step == "stage update of iteration 4: rlhf resume old"
    assert (view.policy_version, view.lineage) == (4, ("old~1: from generate of iteration 2 of old",))
    assert [stage.iteration for stage in view.stages] == list(range(5))
    assert view.reward_before == rows["forked"].reward_before == 1.0
    assert all(stage.stage_states == dict.fromkeys(STAGES, "committed") for stage in view.stages[:4])


def test_rollouts_are_those_that_the_metrics_are_of():
    views = describe_run(STORE, "old").stages
    for iteration in range(5):
        samples = sample_rollouts(STORE, "old", iteration, 100)
        rewards = [sample.reward for sample in samples]
        assert len(rewards) == 8
        assert sum(rewards) / 8 == pytest.approx(views[iteration].metrics["reward/mean"])
        assert all(set(s.components) == {"even", "last_number"} for s in samples)
        assert all(sample.tokens > 0 and "What is" in sample.prompt for sample in samples)


def test_rollouts_have_columns_that_are_written_no_more(store):
    stage = load_lineage(store, "old").load(store, 0, "generate")
    assert set(DEPRECATED) <= set(read_rows(store, [stage]).column_names)


@pytest.mark.parametrize("run", ["old", "forked"])
def test_audit(run):
    view = audit_run(STORE, run)
    assert view.proven, view.damage
    assert view.samples == (40 if run == "old" else 24)


@pytest.mark.parametrize("run", ["old", "forked"])
def test_every_check_before_a_resume_passes_and_changes_nothing(store, run):
    before = contents(store)
    check_before_start(load_config_of(STORE, run))
    assert contents(store) == before


def test_rerun_and_fork(store):
    before = contents(store)
    assert branching.rerun(STORE, "old", 3, "score").iterations == 6
    config = branching.fork(STORE, "old~1", 3, "update", "again", ["optim.learning_rate=1e-4"])
    branching.fork(STORE, "old~0", 2, "advantages", "before", [])
    assert (config.run, config.optim.learning_rate, config.algorithm.kl_coef) == ("again", 1e-4, 0.02)
    for run in ("old", "again", "before"):
        assert audit_run(STORE, run).proven
        check_before_start(load_config_of(STORE, run))
    after = contents(store)
    assert {key: after[key] for key in before} == before
