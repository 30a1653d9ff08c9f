"""`rlhf audit` over small real runs: what it proves, what it finds, and what it says can be rebuilt from what."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.arrays import ragged
from rlhf_core.buffer import StageWriter, commit_stage
from rlhf_core.config import RunConfig
from rlhf_core.errors import IntegrityError, NotCommitted
from rlhf_core.files import upload_files
from rlhf_core.lineage import Lineage, load_lineage, start_branch, start_revision
from rlhf_core.manifests import (
    FORMAT_VERSION,
    STAGES,
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    GuardRecord,
    IterationRecord,
    ParentRef,
    PromptsManifest,
    RetiredRecord,
    RunRecord,
    StageManifest,
)
from rlhf_core.prompts.order import prompt_rows
from rlhf_core.prompts.table import PromptTable, write_prompts
from rlhf_core.records import canonical, commit_record, digest, load_record, seal
from rlhf_core.schema import ROLLOUTS, experience_schema, rewards_schema
from rlhf_core.views import AuditView, Damage
from tasks.audit import ledger
from tasks.audit.run import audit_run

PROMPTS, GROUPS, SAMPLES = 10, 4, 3
CONFIG = {
    "run": "r",
    "iterations": 3,
    "seed": 5,
    "generate": {"prompts_per_iteration": GROUPS, "samples_per_prompt": SAMPLES},
    "resources": {"trainer_ranks": 2},
}


@dataclass
class Run:
    """Writes a run as the stages do."""

    store: LocalObjectStore
    name: str = "r"
    config: dict = field(default_factory=lambda: dict(CONFIG))
    segments: bool = False

    @property
    def lineage(self) -> Lineage:
        return load_lineage(self.store, self.name)

    def start(self) -> Run:
        ids = [f"p{n:02d}" for n in range(PROMPTS)]
        table = pa.table(
            {
                "prompt_id": ids,
                "prompt_text": [f"What is {n}?" for n in range(PROMPTS)],
                "prompt_ids": pa.array([[1, n] for n in range(PROMPTS)], type=pa.list_(pa.int32())),
                "answer": [str(n) for n in range(PROMPTS)],
                "metadata": [""] * PROMPTS,
            }
        )
        prompts = PromptsManifest(
            train=write_prompts(self.store, self.name, "train", table),
            heldout=write_prompts(self.store, self.name, "heldout", table.slice(0, 2)),
        )
        config = RunConfig.model_validate({**self.config, "run": self.name}).model_dump(mode="json")
        record = RunRecord(run=self.name, created="2026-01-01T00:00:00+00:00", config=config, prompts=prompts)
        self.put(layout.run_record(self.name), record)
        return self

    def put(self, key, record) -> None:
        self.store.put(key, canonical(seal(record).model_dump(mode="json")))

    def iterations(self, *numbers: int) -> Run:
        for number in numbers:
            self.stages(number, *STAGES)
        return self

    def stages(self, iteration: int, *stages: str, **more) -> Run:
        for stage in stages:
            getattr(self, stage)(iteration, **more)
        return self

    def manifest(self, iteration, stage, shards=(), parents=(), **more) -> StageManifest:
        lineage = self.lineage
        found = {name: lineage.load(self.store, iteration, name) for name in parents}
        manifest = StageManifest(
            run=lineage.branch_of(iteration, stage),
            iteration=iteration,
            stage=stage,
            attempt="a1",
            parents={name: parent.digest for name, parent in found.items()},
            shards=tuple(shards),
            **{"policy_version": iteration, **more},
        )
        return commit_stage(self.store, manifest)[0]

    def writer(self, iteration, stage) -> StageWriter:
        return StageWriter(self.store, self.lineage.head, iteration, stage, "a1")

    def cut(self, iteration, stage, table) -> list:
        """Two shards, whose edge lies somewhere else in every stage."""
        edge = {"generate": 2 * SAMPLES, "score": 5, "advantages": 3 * SAMPLES}[stage]
        writer = self.writer(iteration, stage)
        return [writer.write_shard(table.slice(a, b - a), a) for a, b in ((0, edge), (edge, table.num_rows))]

    def generate(self, iteration, rows=None, version=None, **_) -> None:
        record = self.lineage.record
        rows = prompt_rows(PROMPTS, GROUPS, iteration, self.config["seed"]) if rows is None else rows
        prompts = PromptTable(self.store, record.prompts.train).at(rows)
        table = rollouts(iteration, prompts, iteration if version is None else version)
        if self.segments:
            writer, shards = self.writer(iteration, "generate"), []
            for groups in ((3, 0), (1, 2)):
                part = pa.concat_tables([table.slice(g * SAMPLES, SAMPLES) for g in groups])
                shard, data = writer.prepare(part, 0, groups)
                self.store.put(shard.key, data)
                shards.append(shard)
        else:
            shards = self.cut(iteration, "generate", table)
        tokens = sum(len(r) for r in table["response_ids"].to_pylist())
        self.manifest(iteration, "generate", shards, tokens=tokens)

    def score(self, iteration, **_) -> None:
        ids = sample_ids(iteration)
        rewards, status = rewards_of(iteration)
        schema = rewards_schema(["exact"])
        columns = {
            "sample_id": ids,
            "reward": rewards,
            "status": status,
            "error": [None if s == "ok" else "broken" for s in status],
            "response_text": ["text"] * len(ids),
            "component/exact": rewards,
        }
        shards = self.cut(iteration, "score", pa.table(columns, schema=schema))
        self.manifest(iteration, "score", shards, ["generate"])

    def advantages(self, iteration, values=None, **_) -> None:
        lengths = lengths_of(iteration)
        values = group_relative(*rewards_of(iteration)) if values is None else values
        flat = np.repeat(np.asarray(values, dtype=np.float32), lengths)
        reference = self.lineage.record.config["algorithm"]["kl_coef"] > 0
        columns = {"sample_id": sample_ids(iteration), "old_logprobs": ragged(-np.ones_like(flat), lengths)}
        if reference:
            columns["ref_logprobs"] = ragged(-np.ones_like(flat), lengths)
        columns["advantages"] = ragged(flat, lengths)
        table = pa.table(columns, schema=experience_schema(reference))
        self.manifest(iteration, "advantages", self.cut(iteration, "advantages", table), ["generate", "score"])

    def update(self, iteration, skipped=None, **_) -> None:
        weights = weights_of(self.lineage.head, iteration + 1)
        if skipped is not None:
            before = self.lineage.find(self.store, iteration - 1, "update")
            weights = before.details["weights_digest"]
        details = {"weights_digest": weights} | ({} if skipped is None else {"skipped": skipped})
        self.manifest(iteration, "update", (), ["generate", "score", "advantages"], details=details)

    def sync(self, iteration, **_) -> None:
        weights = self.lineage.load(self.store, iteration, "update").details["weights_digest"]
        version, details = iteration + 1, {"weights_digest": weights, "engines": ["e0"]}
        self.manifest(iteration, "sync", (), ["update"], policy_version=version, details=details)

    def commit(self, iteration, **_) -> None:
        lineage = self.lineage
        stages = {name: lineage.load(self.store, iteration, name) for name in STAGES[:-1]}
        record = IterationRecord(
            run=lineage.head,
            iteration=iteration,
            policy_version=iteration + 1,
            weights_digest=stages["update"].details["weights_digest"],
            stages={name: manifest.digest for name, manifest in stages.items()},
            metrics={"reward/mean": 0.5},
            stage_seconds=dict.fromkeys(stages, 1.0),
            finished="2026-01-01T00:00:00+00:00",
        )
        assert commit_record(self.store, layout.iteration_done(lineage.head, iteration), record)[1]

    def checkpoint(self, version, tmp_path) -> Run:
        folder = tmp_path / f"checkpoint-{version}"
        (folder / "v").mkdir(parents=True)
        for rank in range(2):
            (folder / "v" / f"rank{rank}.pt").write_bytes(random.Random(version + rank).randbytes(5000))
        prefix = f"{layout.checkpoint_root(self.name, version)}/a1"
        files = upload_files(self.store, folder, folder.rglob("*.pt"), prefix)
        update = self.lineage.load(self.store, version - 1, "update")
        record = CheckpointRecord(
            run=self.name,
            policy_version=version,
            world_size=2,
            weights_digest=update.details["weights_digest"],
            update=update.digest,
            files=tuple(files),
        )
        assert commit_record(self.store, layout.checkpoint_commit(self.name, version), record)[1]
        return self

    def evaluation(self, version) -> Run:
        name = layout.version_name(version)
        record = EvaluationRecord(
            run=self.name, name=name, policy_version=version, prompts=2, metrics={"greedy/reward": 1}
        )
        assert commit_record(self.store, layout.evaluation(self.name, name), record)[1]
        return self

    def export(self, version, tmp_path) -> Run:
        folder = tmp_path / "exported"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(random.Random(version).randbytes(3000))
        name = layout.version_name(version)
        files = upload_files(self.store, folder, folder.iterdir(), layout.export(self.name, name))
        weights = self.lineage.load(self.store, version - 1, "update").details["weights_digest"]
        record = ExportRecord(
            run=self.name, policy_version=version, weights_digest=weights, folder=str(folder), files=tuple(files)
        )
        assert commit_record(self.store, layout.export(self.name, f"{name}.json"), record)[1]
        return self

    def audit(self) -> AuditView:
        return audit_run(self.store.url, self.name)


def sample_ids(iteration) -> list[str]:
    return [f"{iteration:06d}-{g:05d}-{s:03d}" for g in range(GROUPS) for s in range(SAMPLES)]


def lengths_of(iteration) -> np.ndarray:
    lengths = np.random.default_rng(iteration).integers(1, 9, GROUPS * SAMPLES)
    lengths[1] = 0
    return lengths


def rewards_of(iteration) -> tuple[list[float | None], list[str]]:
    """Group 0 learns, group 1 has equal rewards, group 2 one score only, group 3 a sample at the mean and a failed one less."""
    rewards = [0.0, 0.25, 1.0 + iteration, 0.5, 0.5, 0.5, 1.0, None, None, 0.0, 0.5, 1.0]
    status = ["ok"] * 7 + ["failed_infra", "invalid_data"] + ["ok"] * 3
    return rewards, status


def group_relative(rewards, status) -> np.ndarray:
    values = np.array([0.0 if r is None else r for r in rewards]).reshape(GROUPS, SAMPLES)
    ok = (np.array(status) == "ok").reshape(GROUPS, SAMPLES)
    result = np.zeros((GROUPS, SAMPLES))
    for g in range(GROUPS):
        scored = values[g][ok[g]]
        if len(scored) > 1 and scored.max() > scored.min():
            result[g][ok[g]] = (scored - scored.mean()) / (scored.std(ddof=1) + 1e-6)
    return result.ravel()


def weights_of(branch, version) -> str:
    return digest(f"{branch}@{version}".encode())


def rollouts(iteration, prompts, version) -> pa.Table:
    lengths = lengths_of(iteration)
    tokens = int(lengths.sum())
    rows = GROUPS * SAMPLES
    columns = {
        "sample_id": sample_ids(iteration),
        "prompt_id": [p["prompt_id"] for p in prompts for _ in range(SAMPLES)],
        "group": [g for g in range(GROUPS) for _ in range(SAMPLES)],
        "sample": list(range(SAMPLES)) * GROUPS,
        "prompt_ids": [p["prompt_ids"] for p in prompts for _ in range(SAMPLES)],
        "response_ids": ragged(np.arange(tokens, dtype=np.int32), lengths),
        "logprobs": ragged(-np.ones(tokens, dtype=np.float32), lengths),
        "action_mask": ragged(np.ones(tokens, dtype=np.uint8), lengths),
        "policy_version": [version] * rows,
        "attempt": ["a1"] * rows,
        "engine": ["e0"] * rows,
        "finish_reason": ["stop"] * rows,
        "queued_seconds": [None] * rows,
        "seconds": [0.5] * rows,
    }
    return pa.table(columns, schema=ROLLOUTS)


@pytest.fixture
def store(tmp_path) -> LocalObjectStore:
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def finished(store, tmp_path) -> Run:
    """Three iterations, a checkpoint of version 1 and 2, evaluations before and after, an export."""
    run = Run(store).start().evaluation(0).iterations(0, 1, 2)
    return run.checkpoint(1, tmp_path).checkpoint(2, tmp_path).evaluation(3).export(3, tmp_path)


def flip(store, key, place=0.5) -> None:
    data = bytearray(store.get(key))
    data[int(len(data) * place)] ^= 1
    store.put(key, bytes(data))


def only(view: AuditView) -> Damage:
    assert not view.proven
    assert len(view.damage) == 1, [(d.key, d.problem) for d in view.damage]
    return view.damage[0]


def shard_of(run, iteration, stage) -> str:
    return run.lineage.load(run.store, iteration, stage).shards[1].key


def reseal(store, key, model, **changes) -> None:
    """What someone does who edits a record by hand and knows about seals."""
    record = load_record(store, key, model).model_copy(update=changes)
    store.put(key, canonical(seal(record).model_dump(mode="json")))


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
    assert "the stages are intact" in found.remedy


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


def test_weights_must_agree(store):
    run = Run(store).start().iterations(0)
    reseal(store, layout.iteration_done("r", 0), IterationRecord, weights_digest="f" * 64)
    found = only(run.audit())
    assert (found.key, found.kind) == (layout.iteration_done("r", 0), "inconsistent")
    assert "its weights are ffff" in found.problem


def test_versions_step_by_one(store):
    run = Run(store).start()
    run.stages(0, *STAGES[:-1])
    reseal(store, layout.stage_commit("r", 0, "sync"), StageManifest, policy_version=2)
    found = only(run.audit())
    assert (found.key, found.kind) == (layout.stage_commit("r", 0, "sync"), "inconsistent")
    assert "policy version 2" in found.problem


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


def test_what_lies_behind_retired_rows_cannot_be_replayed(store, tmp_path):
    run = Run(store).start().iterations(0, 1).checkpoint(1, tmp_path)
    record = RetiredRecord(run="r", iteration=0, retired="2026-02-01T00:00:00+00:00", reason="old")
    commit_record(store, layout.iteration_retired("r", 0), record)
    flip(store, layout.checkpoint_commit("r", 1))
    assert "cannot be rebuilt: iteration 0 is retired" in only(run.audit()).remedy


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


def fork(run: Run, name: str, iteration: int, stage: str) -> Run:
    parent = ParentRef(run=run.lineage.head, iteration=iteration, stage=stage)
    record = run.lineage.record.model_copy(update={"run": name, "parent": parent, "digest": ""})
    start_branch(run.store, record)
    return Run(run.store, name)


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


def test_a_rerun_is_the_head_and_the_old_branch_stays(finished):
    start_revision(finished.store, finished.lineage, 1, "score", by="me")
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
