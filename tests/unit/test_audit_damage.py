"""`rlhf audit` over damaged runs: which object it names, and what it says can be rebuilt from what."""

from __future__ import annotations

import json

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.manifests import (
    STAGES,
    IterationRecord,
    ParityRecord,
    RetiredRecord,
    StageManifest,
)
from rlhf_core.records import canonical, commit_record, load_record
from tests.fixtures.whole_run import (
    Run,
    finished_run,
    flip,
    fork,
    only,
    reseal,
    shard_of,
)


@pytest.fixture
def store(tmp_path) -> LocalObjectStore:
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def finished(store, tmp_path) -> Run:
    return finished_run(store, tmp_path)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("generate", ["generating again", "`rlhf rerun r --iteration 0 --from generate`"]),
        ("score", ["rollouts are intact", "`rlhf rerun r --iteration 0 --from score`"]),
        ("advantages", ["rollouts and rewards are intact", "`rlhf rerun r --iteration 0 --from advantages`"]),
    ],
)
@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_damaged_shard_is_named_with_its_remedy(finished, stage, words, kind):
    key = shard_of(finished, 0, stage)
    if kind == "damaged":
        flip(finished.store, key)
    else:
        finished.store.delete([key])
    view = finished.audit()
    found = only(view)
    assert (found.key, found.kind, found.iteration, found.stage) == (key, kind, 0, stage)
    assert all(word in found.remedy for word in [*words, "does not need it", "version 2"])
    assert view.stages[0].states[stage] == "damaged"
    assert (view.unproven, view.trained) == (12, 8)


def test_a_cut_shard_is_named(finished):
    key = shard_of(finished, 1, "score")
    finished.store.put(key, finished.store.get(key)[:-10])
    found = only(finished.audit())
    assert found.key == key
    assert "bytes, its commit says" in found.problem
    assert finished.store.url not in found.problem


def test_without_a_checkpoint_behind_it_a_resume_needs_the_experience(store):
    run = Run(store).start().iterations(0, 1)
    flip(store, shard_of(run, 0, "advantages"))
    assert "`rlhf resume r` cannot replay this iteration" in only(run.audit()).remedy


def test_damage_in_front_of_damage_decides_the_remedy(store):
    run = Run(store).start().iterations(0, 1, 2)
    flip(store, shard_of(run, 0, "generate"))
    flip(store, shard_of(run, 0, "advantages"))
    flip(store, shard_of(run, 2, "score"))
    first, second, third = run.audit().damage
    assert "--iteration 0 --from generate" in first.remedy
    assert "its input, stage generate, is damaged too" in second.remedy
    assert "--from generate" in second.remedy
    assert "version 2 cannot be restored (iteration 0 is damaged" in third.remedy


@pytest.mark.parametrize("stage", STAGES[:-1])
@pytest.mark.parametrize("change", ["flipped", "deleted"])
def test_a_damaged_manifest_is_named(finished, stage, change):
    key = layout.stage_commit("r", 1, stage)
    if change == "deleted":
        finished.store.delete([key])
    else:
        flip(finished.store, key)
    view = finished.audit()
    found = only(view)
    assert (found.key, found.kind) == (key, "damaged" if change == "flipped" else "missing")
    assert f"`rlhf rerun r --iteration 1 --from {stage}`" in found.remedy
    assert "(later iterations are then made again)" in found.remedy
    assert view.stages[1].states[stage] == found.kind


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (layout.checkpoint_commit("r", 2), ["version 1", f"delete {layout.checkpoint_commit('r', 2)}", "resume r"]),
        (layout.checkpoint_commit("r", 1), ["version 2 is newer"]),
        ("runs/r/checkpoints/0000000002/a1/v/rank1.pt", ["version 1", "nothing to do", "`rlhf resume r` replays"]),
        (layout.evaluation("r", layout.version_name(3)), ["nothing depends on it"]),
        (layout.export("r", f"{layout.version_name(3)}.json"), ["exports policy version 3 again"]),
        (layout.export("r", f"{layout.version_name(3)}/model.safetensors"), ["exports policy version 3 again"]),
    ],
)
def test_what_lies_beside_the_iterations_is_verified(finished, key, words):
    flip(finished.store, key)
    found = only(finished.audit())
    assert (found.key, found.kind) == (key, "damaged")
    assert all(word in found.remedy for word in words), found.remedy


def test_a_damaged_comparison_with_the_plain_model_is_named(finished):
    record = ParityRecord(
        run="r", dtype="float32", share_prompts=True, plain=True, bound=(1e-4, 3e-4), gaps={}, rows=12, seconds=1.0
    )
    commit_record(finished.store, layout.parity("r"), record)
    assert finished.audit().proven
    flip(finished.store, layout.parity("r"))
    found = only(finished.audit())
    assert (found.key, found.kind) == (layout.parity("r"), "damaged")
    assert "in which layout the run trains" in found.remedy


def test_a_missing_checkpoint_file_is_named(finished):
    key = "runs/r/checkpoints/0000000002/a1/v/rank0.pt"
    finished.store.delete([key])
    view = finished.audit()
    assert (only(view).key, only(view).kind) == (key, "missing")
    assert view.checkpoints == (1,)


def test_a_checkpoint_that_cannot_be_replayed_is_lost(store, tmp_path):
    run = Run(store).start().iterations(0, 1, 2).checkpoint(2, tmp_path)
    flip(store, layout.checkpoint_commit("r", 2))
    flip(store, shard_of(run, 1, "advantages"))
    checkpoint = next(d for d in run.audit().damage if "checkpoints" in d.key)
    assert "cannot be rebuilt: iteration 1 is damaged" in checkpoint.remedy


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_a_damaged_prompt_table_is_named(finished, name):
    key = getattr(finished.lineage.record.prompts, name).key
    flip(finished.store, key)
    found = only(finished.audit())
    assert found.key == key
    assert "same source and seed" in found.remedy


def test_a_missing_end_of_an_iteration_in_the_middle(finished):
    key = layout.iteration_done("r", 0)
    finished.store.delete([key])
    found = only(finished.audit())
    assert (found.key, found.kind, found.stage) == (key, "missing", "commit")
    assert "the iterations 1 to 2 come after this gap" in found.problem
    assert found.remedy.startswith("the stages are intact: take it from a copy of the store, or `rlhf rerun r")
    assert "--iteration 0 --from sync` (later iterations are then made again)" in found.remedy


def test_the_end_of_the_last_iteration_is_written_again_by_resume(finished):
    key = layout.iteration_done("r", 2)
    flip(finished.store, key)
    assert f"delete {key}, then `rlhf resume r` commits the iteration again" in only(finished.audit()).remedy
    finished.store.delete([key])  # the evaluation and the export tell that it was there
    assert only(finished.audit()).remedy == "the stages are intact: `rlhf resume r` commits the iteration again"


def test_a_run_record_that_is_gone(finished):
    finished.store.delete([layout.run_record("r")])
    found = only(finished.audit())
    assert (found.key, found.kind) == (layout.run_record("r"), "missing")
    assert "iterations 0 to 2" in found.problem
    assert "`rlhf train PRESET --run r`" in found.remedy


def test_a_run_record_that_was_edited(finished):
    key = layout.run_record("r")
    body = json.loads(finished.store.get(key))
    body["config"]["seed"] = 6
    finished.store.put(key, canonical(body))
    found = only(finished.audit())
    assert (found.key, found.kind) == (key, "damaged")
    assert "was changed" in found.problem


def test_a_manifest_that_was_edited_and_sealed_again(finished):
    key = layout.stage_commit("r", 1, "score")
    reseal(finished.store, key, StageManifest, attempt="mine")
    found = only(finished.audit())
    assert (found.key, found.kind) == (key, "inconsistent")
    assert "advantages and update and commit read" in found.problem


def test_an_end_that_was_edited_and_sealed_again(finished):
    key = layout.iteration_done("r", 1)
    record = load_record(finished.store, key, IterationRecord)
    reseal(finished.store, key, IterationRecord, stages={**record.stages, "score": "0" * 64, "update": "1" * 64})
    damage = finished.audit().damage
    assert {d.key for d in damage} == {key}
    assert len(damage) == 2


def test_what_lies_behind_retired_rows_cannot_be_replayed(store, tmp_path):
    run = Run(store).start().iterations(0, 1).checkpoint(1, tmp_path)
    record = RetiredRecord(run="r", iteration=0, retired="2026-02-01T00:00:00+00:00", reason="old")
    commit_record(store, layout.iteration_retired("r", 0), record)
    flip(store, layout.checkpoint_commit("r", 1))
    assert "cannot be rebuilt: iteration 0 is retired" in only(run.audit()).remedy


def test_damage_of_the_parent_is_found_from_the_fork(finished):
    child = fork(finished, "child", 1, "advantages").stages(1, "advantages", "update", "sync", "commit")
    key = shard_of(finished, 1, "score")
    flip(finished.store, key)
    flip(finished.store, shard_of(finished, 2, "score"))  # not the fork's business
    found = only(child.audit())
    assert found.key == key
    assert "`rlhf rerun child --iteration 1 --from score`" in found.remedy


def test_a_fork_whose_parent_is_gone(finished):
    child = fork(finished, "child", 1, "advantages")
    finished.store.delete([layout.run_record("r")])
    assert only(child.audit()).key == layout.run_record("r")


def test_a_parent_that_does_not_know_its_fork(finished):
    child = fork(finished, "child", 1, "advantages")
    key = layout.child("r", "child")
    finished.store.delete([key])
    found = only(child.audit())
    assert (found.key, found.kind) == (key, "missing")
    assert "retired" in found.remedy
