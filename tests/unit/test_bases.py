"""Which weights a version has after a replay that was not exact, and what a replay has to give."""

from __future__ import annotations

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.bases import environment_id, find_environment, newest_base, promised, start_base, weights_of
from rlhf_core.errors import NotCommitted
from rlhf_core.lineage import start_revision
from rlhf_core.manifests import BaseRecord, EnvironmentRecord, ParentRef, StageManifest
from rlhf_core.records import commit_record
from tests.fixtures.whole_run import Run

HERE = "a" * 16
UPDATE = StageManifest(
    run="r",
    iteration=0,
    stage="update",
    attempt="a",
    policy_version=0,
    details={"weights_digest": "w1", "from_weights": "w0", "environment": HERE},
)


def rerun(run, iteration, stage):
    start_revision(run.store, run.lineage, ParentRef(run="r", iteration=iteration, stage=stage), by="test")
    return run


@pytest.fixture
def run(tmp_path):
    return Run(LocalObjectStore(tmp_path)).start().iterations(0, 1)


def replayed(run, version, weights, reason="another machine"):
    return start_base(run.store, run.lineage, version, weights, start=0, environment=HERE, reason=reason)


def committed(run, version):
    return run.lineage.load(run.store, version - 1, "update").details["weights_digest"]


def environment(run, exact):
    record = EnvironmentRecord(run="r", facts={"device": "cpu"}, exact=exact)
    commit_record(run.store, layout.environment("r", HERE), record)


def test_a_version_has_the_weights_of_its_update(run):
    assert weights_of(run.store, run.lineage, 0) is None
    assert weights_of(run.store, run.lineage, 2) == committed(run, 2)
    with pytest.raises(NotCommitted):
        weights_of(run.store, run.lineage, 3)


def test_the_newest_base_counts(run):
    before = committed(run, 2)
    first, second = replayed(run, 2, "x" * 64), replayed(run, 2, "y" * 64)
    assert (first.number, first.replaces, second.number, second.replaces) == (1, before, 2, "x" * 64)
    assert weights_of(run.store, run.lineage, 2) == "y" * 64
    assert weights_of(run.store, run.lineage, 1) == committed(run, 1)


def test_what_earlier_versions_called_the_base_of_a_branch_counts(run):
    rerun(run, 1, "generate")
    commit_record(run.store, layout.first_base("r~1"), BaseRecord(run="r~1", policy_version=1, weights_digest="z" * 64))
    assert run.lineage.head == "r~1"
    assert weights_of(run.store, run.lineage, 1) == "z" * 64
    replayed(run, 1, "y" * 64)
    assert weights_of(run.store, run.lineage, 1) == "y" * 64


def test_a_branch_sees_the_bases_of_what_it_shares(run):
    replayed(run, 1, "x" * 64)
    rerun(run, 1, "generate")
    assert weights_of(run.store, run.lineage, 1) == "x" * 64
    replayed(run, 1, "y" * 64)
    assert newest_base(run.store, run.lineage, 1).run == "r~1"


@pytest.mark.parametrize(
    ("weights", "where", "tested", "expected"),
    [
        ("w0", HERE, True, True),
        ("w0", HERE, False, False),
        ("w0", HERE, None, False),
        ("w0", "b" * 16, True, False),
        ("other", HERE, True, False),
        (None, HERE, True, False),
    ],
)
def test_only_the_same_weights_in_the_same_tested_environment_promise(run, weights, where, tested, expected):
    if tested is not None:
        environment(run, tested)
    assert promised(run.store, run.lineage, UPDATE, weights, where) is expected


def test_an_update_that_does_not_say_what_computed_it_promises_nothing(run):
    environment(run, exact=True)
    old = UPDATE.model_copy(update={"details": {"weights_digest": "w1"}})
    assert not promised(run.store, run.lineage, old, None, HERE)


def test_environments_are_named_by_what_they_are(run):
    facts = {"device": "cpu", "packages": {"torch": "2"}}
    assert environment_id(facts) == environment_id(dict(reversed(facts.items())))
    assert environment_id(facts) != environment_id({**facts, "packages": {"torch": "3"}})
    assert find_environment(run.store, run.lineage, HERE) is None
