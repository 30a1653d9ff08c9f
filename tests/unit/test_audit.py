"""`rlhf audit` over small real runs: what it proves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.bases import start_base
from rlhf_core.errors import IntegrityError, NotCommitted
from rlhf_core.lineage import start_revision
from rlhf_core.manifests import (
    FORMAT_VERSION,
    STAGES,
    GuardRecord,
    IterationRecord,
    ParentRef,
    RetiredRecord,
    StageManifest,
)
from rlhf_core.prompts.order import prompt_rows
from rlhf_core.records import canonical, commit_record, load_record
from tasks.audit import ledger
from tests.fixtures.whole_run import (
    CONFIG,
    GROUPS,
    PROMPTS,
    Run,
    finished_run,
    flip,
    fork,
    group_relative,
    lengths_of,
    only,
    reseal,
    rewards_of,
    shard_of,
)


@pytest.fixture
def store(tmp_path) -> LocalObjectStore:
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def finished(store, tmp_path) -> Run:
    return finished_run(store, tmp_path)


def test_a_whole_run_is_proven(finished):
    view = finished.audit()
    assert (view.proven, view.damage) == (True, ())
    assert (view.iterations, view.iterations_done, view.branches) == (3, 3, ("r",))
    # run, 3 x (5 manifests + DONE), 2 checkpoints, 2 evaluations, export
    assert view.records == 1 + 18 + 2 + 2 + 1
    # 3 x 3 stages x 2 shards, 2 prompt tables, 2 x 2 checkpoint files, 1 exported file
    assert view.objects == 18 + 2 + 4 + 1
    assert view.bytes > 20_000
    assert view.checkpoints == (1, 2)


def test_every_sample_has_one_fate(finished):
    view = finished.audit()
    assert (view.prompts, view.samples) == (12, 36)
    assert view.tokens == sum(int(lengths_of(k).sum()) for k in range(3))
    assert view.trained == 3 * 4
    assert view.left_out == {
        ledger.NO_TOKENS: 3,
        ledger.EQUAL: 9,
        ledger.TOO_FEW: 3,
        ledger.AT_MEAN: 3,
        "failed_infra": 3,
        "invalid_data": 3,
    }
    assert view.trained + sum(view.left_out.values()) == view.samples
    assert (view.waiting, view.retired, view.unproven) == (0, 0, 0)


def test_prompts_are_used_once_an_epoch(finished):
    first, second = finished.audit().epochs
    assert (first.epoch, first.prompts, first.used, first.least, first.most) == (0, PROMPTS, 10, 1, 1)
    assert (second.epoch, second.used, second.least, second.most) == (1, 2, 0, 1)


def test_segments_of_a_streamed_stage_are_put_in_order(store):
    run = Run(store, segments=True).start().iterations(0, 1)
    view = run.audit()
    assert view.proven, view.damage
    assert view.trained == 2 * 4


def test_with_a_reference_every_scored_sample_is_trained(store):
    run = Run(store, config={**CONFIG, "algorithm": {"kl_coef": 0.1}}).start().iterations(0)
    view = run.audit()
    assert view.proven, view.damage
    assert view.left_out == {ledger.NO_TOKENS: 1, "failed_infra": 1, "invalid_data": 1}


def test_an_unfinished_iteration_is_open_not_damaged(store):
    run = Run(store).start().iterations(0).stages(1, "generate", "score")
    view = run.audit()
    assert view.proven, view.damage
    assert view.iterations_done == 1
    assert list(view.stages[1].states.values()) == ["intact", "intact", "open", "open", "open", "open"]
    assert view.waiting == 12


def test_a_run_that_has_only_begun(store):
    view = Run(store).start().audit()
    assert (view.proven, view.stages, view.samples, view.records) == (True, (), 0, 1)


def test_other_prompts_than_the_order_gives(store):
    run = Run(store).start()
    rows = prompt_rows(PROMPTS, GROUPS, 0, CONFIG["seed"])
    run.stages(0, *STAGES, rows=[rows[0], rows[0], *rows[2:]])
    found = only(run.audit())
    assert (found.key, found.kind) == (layout.stage_commit("r", 0, "generate"), "inconsistent")
    assert "its prompts are not those of iteration 0: 1 groups differ, group 1" in found.problem


def test_rollouts_of_another_version(store):
    run = Run(store).start().iterations(0)
    run.stages(1, "generate", version=0)
    assert "12 samples were not generated with policy version 1" in only(run.audit()).problem


def test_advantages_that_do_not_follow_from_the_rewards(store):
    run = Run(store).start()
    values = group_relative(*rewards_of(0))
    values[[4, 11]] = 0.5, -0.5  # one in a group of equal rewards, one with the wrong sign
    run.stages(0, *STAGES, values=values)
    found = only(run.audit())
    assert found.key == layout.stage_commit("r", 0, "advantages")
    assert "2 advantages do not follow from the rewards: sample '000000-00001-001' has 0.5" in found.problem


def test_a_batch_that_a_guard_left_out(store):
    run = Run(store).start().iterations(0)
    record = GuardRecord(run="r", iteration=1, reason="update/grad_norm = 9")
    commit_record(store, layout.guard("r", 1), record)
    run.stages(1, *STAGES, skipped="update/grad_norm = 9")
    view = run.audit()
    assert view.proven, view.damage
    assert view.stages[1].skipped == "update/grad_norm = 9"
    assert view.stages[1].left_out == {ledger.SKIPPED: 12}


def test_a_rolled_back_batch_that_was_trained_all_the_same(store):
    run = Run(store).start().iterations(0, 1)
    commit_record(store, layout.guard("r", 1), GuardRecord(run="r", iteration=1, reason="reward collapsed"))
    assert "a guard rolled it back (reward collapsed), but it was applied" in only(run.audit()).problem


def test_retired_rows_are_counted_not_missed(finished):
    store = finished.store
    record = RetiredRecord(run="r", iteration=0, retired="2026-02-01T00:00:00+00:00", reason="old")
    commit_record(store, layout.iteration_retired("r", 0), record)
    for stage in ("generate", "score", "advantages"):
        store.delete(store.list(layout.stage_data("r", 0, stage)))
    view = finished.audit()
    assert view.proven, view.damage
    assert (view.objects_retired, view.retired, view.samples, view.trained) == (6, 12, 36, 8)
    assert list(view.stages[0].states.values()) == ["retired"] * 3 + ["intact"] * 3
    assert view.epochs[0].least == view.epochs[0].most == 1


def test_weights_must_agree(store):
    run = Run(store).start().iterations(0)
    reseal(store, layout.iteration_done("r", 0), IterationRecord, weights_digest="f" * 64)
    found = only(run.audit())
    assert (found.key, found.kind) == (layout.iteration_done("r", 0), "inconsistent")
    assert "its weights are ffff" in found.problem


def test_weights_of_a_replay_that_was_not_exact_are_proven(store):
    run = Run(store).start().iterations(0).stages(1, "generate", "score", "advantages", "update")
    start_base(store, run.lineage, 2, "e" * 64, start=0, environment="h", reason="another machine")
    for stage in ("sync", "commit"):
        run.stages(1, stage)
    reseal(store, layout.stage_commit("r", 1, "sync"), StageManifest, details={"weights_digest": "e" * 64})
    sync = run.lineage.load(store, 1, "sync").digest
    stages = load_record(store, layout.iteration_done("r", 1), IterationRecord).stages | {"sync": sync}
    reseal(store, layout.iteration_done("r", 1), IterationRecord, weights_digest="e" * 64, stages=stages)
    run.stages(2, "generate", "score", "advantages", "update")
    details = {**run.lineage.load(store, 2, "update").details, "from_weights": "e" * 64}
    reseal(store, layout.stage_commit("r", 2, "update"), StageManifest, details=details)
    view = run.audit()
    assert view.proven, view.damage
    assert view.replayed == ("policy version 2 of r was replayed from version 0, not exactly: another machine",)


def test_an_update_begins_with_the_weights_of_its_version(store):
    run = Run(store).start().iterations(0).stages(1, "generate", "score", "advantages", "update")
    details = {**run.lineage.load(store, 1, "update").details, "from_weights": "e" * 64}
    reseal(store, layout.stage_commit("r", 1, "update"), StageManifest, details=details)
    assert "it began with weights" in only(run.audit()).problem


def test_versions_step_by_one(store):
    run = Run(store).start()
    run.stages(0, *STAGES[:-1])
    reseal(store, layout.stage_commit("r", 0, "sync"), StageManifest, policy_version=2)
    found = only(run.audit())
    assert (found.key, found.kind) == (layout.stage_commit("r", 0, "sync"), "inconsistent")
    assert "policy version 2" in found.problem


def test_a_newer_format_is_refused_with_both_versions(finished):
    key = layout.stage_commit("r", 1, "update")
    body = json.loads(finished.store.get(key))
    body["format"] = FORMAT_VERSION + 1
    finished.store.put(key, canonical(body))
    with pytest.raises(IntegrityError) as refused:
        finished.audit()
    assert f"format {FORMAT_VERSION + 1}" in str(refused.value)
    assert f"up to {FORMAT_VERSION}" in str(refused.value)


def test_there_is_no_such_run(store):
    with pytest.raises(NotCommitted, match="no run 'r'"):
        Run(store).audit()


def test_a_fork_is_proven_with_the_stages_it_shares(finished):
    child = fork(finished, "child", 1, "advantages")
    view = child.audit()  # before it has done anything of its own
    assert view.proven, view.damage
    assert (view.iterations_done, view.waiting) == (1, 12)
    child.stages(1, "advantages", "update", "sync", "commit")
    view = child.audit()
    assert view.proven, view.damage
    assert view.branches == ("child", "r")
    assert view.stages[0].shared == dict.fromkeys(STAGES, "r")
    assert view.stages[1].shared == {"generate": "r", "score": "r"}
    assert view.checkpoints == (1,)  # that of version 2 is the parent's own
    assert view.samples == 24


def test_a_rerun_is_the_head_and_the_old_branch_stays(finished):
    parent = ParentRef(run="r", iteration=1, stage="score")
    start_revision(finished.store, finished.lineage, parent, by="me", request="")
    finished.stages(1, *STAGES[1:]).iterations(2)
    view = finished.audit()
    assert view.proven, view.damage
    assert view.branches == ("r~1", "r")
    assert view.stages[1].shared == {"generate": "r"}
    assert view.iterations_done == 3
    key = layout.revision("r", 1)
    flip(finished.store, key)
    found = only(finished.audit())
    assert (found.key, found.kind) == (key, "damaged")


def rlhf(*arguments, cwd):
    command = [sys.executable, "-m", "flows.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_a_table_and_says_by_its_exit_code(finished, tmp_path):
    done = rlhf("audit", "r", "--store", finished.store.url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "everything is proven" in done.stdout
    assert ledger.EQUAL in done.stdout
    key = shard_of(finished, 1, "advantages")
    flip(finished.store, key)
    done = rlhf("audit", "r", "--store", finished.store.url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert f"damaged {key} (iteration 1, advantages)" in done.stdout
    assert "-> rollouts and rewards are intact: `rlhf rerun r --iteration 1 --from advantages`" in done.stdout
    done = rlhf("audit", "r", "--store", finished.store.url, "--json", cwd=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["damage"][0]["key"] == key
    assert rlhf("audit", "nobody", "--store", finished.store.url, cwd=tmp_path).returncode == 3


def test_the_audit_loads_neither_prefect_nor_ray_nor_torch():
    program = "import tasks.audit.run, flows.cli.audit, sys; print(*{'prefect', 'ray', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
