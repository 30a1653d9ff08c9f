"""Rerun and fork of real small runs: what is shared, what may differ, what is refused, and that nothing is overwritten."""

from __future__ import annotations

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.buffer import read_rows
from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError, NotCommitted, RunLocked, StoreError, UserError
from rlhf_core.lease import Holder, Lease
from rlhf_core.lineage import children, head_of, load_lineage
from rlhf_core.manifests import STAGES, RetiredRecord, TargetRecord
from rlhf_core.records import commit_record
from tasks import branching
from tasks.progress import load_progress
from tests.fixtures.stored_run import revisions
from tests.fixtures.whole_run import CONFIG, Run


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def run(store):
    """Three iterations, and the fourth up to its scores."""
    return Run(store).start().iterations(0, 1, 2).stages(3, "generate", "score")


def rerun(run, iteration, stage, request=""):
    return branching.rerun(run.store.url, run.name, iteration, stage, request)


def fork(run, iteration, stage, *overrides, name="f"):
    return branching.fork(run.store.url, run.name, iteration, stage, name, overrides)


def contents(store):
    return {key: store.get(key) for key in store.list("")}


def written(before, store):
    """The new keys; nothing that was there may change. The lease is the driver's."""
    after = contents(store)
    assert {key: after.get(key) for key in before} == before
    return sorted(key for key in after.keys() - before.keys() if "/lease/" not in key)


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_fork_shares_and_copies_nothing(run, stage):
    store, before = run.store, contents(run.store)
    config = fork(run, 1, stage)
    assert written(before, store) == ["runs/f/run.json", "runs/r/children/f.json"]
    assert config.run_id == "f"
    lineage = load_lineage(store, "f")
    for iteration in range(3):
        for name in STAGES[:-1]:
            theirs = run.lineage.load(store, iteration, name)
            shared = (iteration, STAGES.index(name)) < (1, STAGES.index(stage))
            assert lineage.find(store, iteration, name) == (theirs if shared else None)
    progress = load_progress(store, lineage)
    assert (progress.next_iteration, progress.policy_version) == (1, 2 if stage == "sync" else 1)
    assert lineage.record.prompts == run.lineage.record.prompts


def test_a_fork_goes_on_and_is_proven(run):
    store = run.store
    fork(run, 1, "advantages", "optim.learning_rate=1e-3")
    before = contents(store)
    child = Run(store, "f").stages(1, "advantages", "update", "sync", "commit").iterations(2)
    assert all(key.startswith("runs/f/") for key in written(before, store))
    stages = [child.lineage.load(store, 1, name) for name in STAGES[:3]]
    assert [stage.run for stage in stages] == ["r", "r", "f"]
    assert read_rows(store, stages, columns=["reward", "advantages"]).num_rows == 12
    view = child.audit()
    assert view.proven, view.damage
    assert run.audit().proven


def test_overrides_hold(run):
    config = fork(
        run, 1, "score", "reward.functions=[{name='length', function='m:f'}]", "optim.learning_rate=0.5", "iterations=9"
    )
    assert config.optim.learning_rate == 0.5
    assert [function.name for function in config.reward.functions] == ["length"]
    assert config.iterations == 9
    assert config.storage.url == run.store.url
    stored = parse_config(load_lineage(run.store, "f").record.config)
    assert (stored.optim.learning_rate, stored.iterations, stored.run) == (0.5, 9, "f")
    parent = parse_config(run.lineage.record.config)
    assert parent.optim.learning_rate == 2e-5
    # Each stage keeps the configuration that made it.
    lineage = load_lineage(run.store, "f")
    assert lineage.owner(1, "generate").config["optim"]["learning_rate"] == 2e-5
    assert lineage.owner(1, "update").config["optim"]["learning_rate"] == 0.5


def test_a_fork_has_at_least_its_first_iteration(run):
    assert fork(run, 1, "score").iterations == 3
    assert fork(run, 3, "score", name="g").iterations == 4  # the parent was to have three
    commit_record(run.store, layout.run_target("r"), TargetRecord(iterations=8))
    assert fork(run, 1, "score", name="h").iterations == 8


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["model.source='other'"], ["model.source"]),
        (["seed=6"], ["seed: 5 -> 6"]),
        (["prompts.heldout=3", "seed=6"], ["prompts.heldout", "seed"]),
        (["storage.url='elsewhere'"], ["storage.url"]),
    ],
)
def test_what_a_fork_shares_cannot_differ(run, overrides, keys):
    before = contents(run.store)
    for stage in STAGES[:-1]:
        with pytest.raises(ConfigError, match="cannot change") as error:
            fork(run, 1, stage, *overrides)
        for key in keys:
            assert f"\n  {key}" in str(error.value)
        assert "rlhf train" in str(error.value)
    assert written(before, run.store) == []


@pytest.mark.parametrize(
    "override",
    ["generate.prompts_per_iteration=8", "generate.samples_per_prompt=4", "generate.temperature=0.5"],
)
def test_rollouts_that_are_shared_were_sampled_as_they_were(run, override):
    for stage in ("score", "advantages", "update"):
        with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")) as error:
            fork(run, 1, stage, override)
        assert "fork from stage generate" in str(error.value)
    assert fork(run, 1, "generate", override, name="g").run_id == "g"
    assert fork(run, 1, "sync", override, name="s").run_id == "s"  # holds from the next iteration on


def test_experience_that_is_shared_has_reference_logprobs_or_not(run):
    with pytest.raises(ConfigError, match=r"algorithm\.kl_coef = 0\.1.*no reference logprobs.*stage advantages"):
        fork(run, 1, "update", "algorithm.kl_coef=0.1")
    assert not run.store.exists(layout.run_record("f"))
    assert fork(run, 1, "advantages", "algorithm.kl_coef=0.1").algorithm.kl_coef == 0.1
    with_reference = Run(run.store, "k", {**CONFIG, "algorithm": {"kl_coef": 0.1}}).start().iterations(0)
    assert fork(with_reference, 0, "update", "algorithm.kl_coef=0.3", name="k3").algorithm.kl_coef == 0.3
    assert fork(with_reference, 0, "update", "algorithm.kl_coef=0.0", name="k0").algorithm.kl_coef == 0.0


@pytest.mark.parametrize(
    "override", ["optim.learning_rat=1", "iterations=0", "nonsense", "optim.updates_per_iteration=3"]
)
def test_overrides_that_no_run_accepts(run, override):
    with pytest.raises(ConfigError, match="--set"):
        fork(run, 1, "score", override)
    assert not run.store.exists(layout.run_record("f"))


def test_a_name_that_is_taken(run):
    other = Run(run.store, "f").start()
    before = contents(run.store)
    with pytest.raises(ConfigError, match=r"run 'f' exists already and is not this fork.*--run NAME"):
        fork(run, 1, "score")
    with pytest.raises(ConfigError, match="run 'r' exists already"):
        fork(run, 1, "score", name="r")
    for name in ("../up", "r~1", "", "a/b", "x" * 64):
        with pytest.raises(UserError, match="run id"):
            fork(run, 1, "score", name=name)
    assert written(before, run.store) == []
    assert other.lineage.record.parent is None


def test_repeating_a_fork_changes_nothing(run):
    config = fork(run, 1, "advantages", "optim.learning_rate=0.5")
    child = Run(run.store, "f").stages(1, "advantages", "update")
    before = contents(run.store)
    assert fork(run, 1, "advantages", "optim.learning_rate=0.5") == config
    commit_record(run.store, layout.run_target("r"), TargetRecord(iterations=8))  # the parent goes on
    before = contents(run.store)
    assert fork(run, 1, "advantages", "optim.learning_rate=0.5") == config
    assert written(before, run.store) == []
    for iteration, stage, override in ((1, "update", 0.5), (2, "advantages", 0.5), (1, "advantages", 0.25)):
        with pytest.raises(ConfigError, match="is not this fork"):
            fork(run, iteration, stage, f"optim.learning_rate={override}")
    assert written(before, run.store) == []
    assert load_progress(run.store, child.lineage).policy_version == 2


def test_a_fork_of_a_fork_and_of_an_older_revision(run):
    fork(run, 1, "score")
    child = Run(run.store, "f").stages(1, *STAGES[1:])
    fork(child, 2, "generate", name="g")
    lineage = load_lineage(run.store, "g")
    assert [record.run for record in lineage.records] == ["g", "f", "r"]
    assert [lineage.branch_of(1, stage) for stage in STAGES] == ["r", *["f"] * 5]
    assert {record.child for record in children(run.store, "r")} == {"f", "g"}
    rerun(run, 2, "generate")
    rerun(run, 1, "generate")
    fork(Run(run.store, "r~1"), 2, "generate", name="h")
    assert load_lineage(run.store, "h").record.parent.run == "r~1"


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_rerun_is_a_new_head(run, stage):
    store, before = run.store, contents(run.store)
    config = rerun(run, 1, stage)
    assert written(before, store) == ["runs/r/children/r~1.json", "runs/r/revisions/000001.json", "runs/r~1/run.json"]
    assert (config.run_id, config.iterations, config.storage.url) == ("r", 3, store.url)
    assert head_of(store, "r") == "r~1"
    progress = load_progress(store, run.lineage)
    assert (progress.run, progress.next_iteration) == ("r~1", 1)
    (record,) = revisions(store, "r")
    assert (record.parent.run, record.parent.iteration, record.parent.stage) == ("r", 1, stage)
    assert str(Holder.current()) == record.by
    run.stages(1, *STAGES[STAGES.index(stage) :]).iterations(2)
    assert all(store.get(key) == data for key, data in before.items())
    view = run.audit()
    assert view.proven, view.damage
    assert view.branches == ("r~1", "r")


def test_a_rerun_has_as_many_iterations_as_were_asked_for_last(run):
    commit_record(run.store, layout.run_target("r"), TargetRecord(iterations=8))
    run.stages(3, *STAGES[2:]).iterations(4)
    assert rerun(run, 3, "score").iterations == 8  # and not 3, as the configuration says
    assert rerun(run, 3, "score").iterations == 8


def test_a_rerun_redoes_at_least_its_iteration(run):
    assert rerun(run, 3, "score").iterations == 4


def test_the_same_request_makes_one_revision(run):
    first = rerun(run, 1, "score", request="flow-run")
    run.stages(1, *STAGES[1:])
    before = contents(run.store)
    assert rerun(run, 1, "score", request="flow-run") == first
    assert written(before, run.store) == []
    assert head_of(run.store, "r") == "r~1"
    rerun(run, 1, "score", request="another")
    assert head_of(run.store, "r") == "r~2"


def test_a_run_that_is_driven(run):
    before = contents(run.store)
    with Lease.acquire(run.store, "r", Holder.current()):
        with pytest.raises(RunLocked, match=f"run 'r' is driven by .*pid {Holder.current().pid}"):
            rerun(run, 1, "score")
        assert head_of(run.store, "r") == "r"
        assert fork(run, 1, "score").run_id == "f"  # a fork takes nothing away from it
    assert written(before, run.store) == ["runs/f/run.json", "runs/r/children/f.json"]
    rerun(run, 1, "score")


def test_the_lease_is_given_back_after_a_refusal(run):
    with pytest.raises(NotCommitted):
        rerun(run, 3, "update")
    retire(run.store, 0)
    with pytest.raises(NotCommitted):
        rerun(run, 1, "score")
    with Lease.acquire(run.store, "r", Holder.current()):
        pass


def retire(store, *iterations, branch="r"):
    for k in iterations:
        record = RetiredRecord(run=branch, iteration=k, retired="2026-01-01T00:00:00+00:00", reason="test")
        commit_record(store, layout.iteration_retired(branch, k), record)


@pytest.mark.parametrize("begin", [rerun, fork])
def test_rollouts_that_were_deleted_cannot_be_replayed(run, tmp_path, begin):
    run.checkpoint(2, tmp_path)
    retire(run.store, 0)
    before = contents(run.store)
    for iteration, stage in ((0, "score"), (0, "update"), (1, "generate"), (1, "update")):
        with pytest.raises(NotCommitted, match=r"rollouts of iteration 0 of 'r' were deleted at 2026.*\(test\)"):
            begin(run, iteration, stage)
        assert written(before, run.store) == []
    # From a checkpoint on nothing before it is needed; and the first stage of all needs nothing.
    for iteration, stage in ((2, "generate"), (1, "sync"), (2, "update"), (3, "score"), (0, "generate")):
        begin(run, iteration, stage, **({"name": f"f{iteration}{stage}"} if begin is fork else {}))
        if begin is rerun:
            break


def test_a_fork_that_was_refused_holds_nothing_back(run):
    retire(run.store, 0)
    with pytest.raises(NotCommitted):
        fork(run, 1, "score")
    assert children(run.store, "r") == []
    assert not run.store.exists(layout.run_record("f"))


@pytest.mark.parametrize("begin", [rerun, fork])
def test_mistakes(run, begin):
    before = contents(run.store)
    for stage in ("commit", "fly", "", "Score"):
        with pytest.raises(ConfigError, match="name one of generate, score, advantages, update, sync"):
            begin(run, 1, stage)
    with pytest.raises(ConfigError, match="count from 0"):
        begin(run, -1, "score")
    for iteration, stage in ((3, "update"), (4, "generate"), (99, "score")):
        with pytest.raises(NotCommitted, match=f"'r' has not reached stage '{stage}' of iteration {iteration}"):
            begin(run, iteration, stage)
    nobody = Run(run.store, "nobody")
    with pytest.raises(NotCommitted, match="no run 'nobody'"):
        begin(nobody, 0, "score")
    with pytest.raises(UserError, match="run id"):
        begin(Run(run.store, "../up"), 0, "score")
    assert written(before, run.store) == []


def test_an_older_revision_is_not_rerun(run):
    rerun(run, 1, "score")
    with pytest.raises(UserError, match="run id 'r~1'"):
        rerun(Run(run.store, "r~1"), 1, "score")
    with pytest.raises(StoreError, match="ftp://x"):
        branching.rerun("ftp://x", "r", 0, "score")


def change(run, *overrides):
    return branching.change_topology(run.store.url, run.name, overrides)


def test_another_topology_goes_on_where_the_run_stands(run):
    before = contents(run.store)
    config = change(run, "resources.trainer_ranks=1", "resources.engines=3")
    assert written(before, run.store) == [
        "runs/r/children/r~1.json",
        "runs/r/revisions/000001.json",
        "runs/r~1/run.json",
    ]
    assert (config.resources.trainer_ranks, config.resources.engines) == (1, 3)
    assert config.iterations == 4  # the one that has begun counts
    lineage = run.lineage
    assert (lineage.record.parent.iteration, lineage.record.parent.stage) == (3, "advantages")
    assert lineage.base_version() == 3
    assert [lineage.is_exact(k) for k in range(5)] == [False, False, False, True, True]
    run.stages(3, *STAGES[2:-1])
    change(run, "resources.engines=2")
    lineage = run.lineage
    assert (lineage.record.parent.run, lineage.record.parent.iteration, lineage.record.parent.stage) == (
        "r~1",
        3,
        "commit",
    )
    assert lineage.base_version() == 4
    assert [lineage.is_exact(k) for k in range(5)] == [False, False, False, True, True]  # engines add no gradients
    run.stages(3, "commit")
    view = run.audit()
    assert view.proven, view.damage


def test_a_topology_is_all_that_changes(run):
    before = contents(run.store)
    for overrides in (["optim.learning_rate=1"], ["resources.engines=2", "seed=6"], ["iterations=9"]):
        with pytest.raises(ConfigError, match="changes keys of `resources` and nothing else"):
            change(run, *overrides)
    for overrides in ([], ["resources.trainer_ranks=2"]):
        with pytest.raises(ConfigError, match="nothing changes"):
            change(run, *overrides)
    with pytest.raises(ConfigError, match="trainer_ranks"):
        change(run, "resources.trainer_ranks=0")
    with Lease.acquire(run.store, "r", Holder.current()), pytest.raises(RunLocked, match="driven by"):
        change(run, "resources.engines=2")
    assert written(before, run.store) == []
