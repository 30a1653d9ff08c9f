"""Everything that reads stored data, on data of every kind: no reader may fail, and each says what is there."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from flows.cli import audit as audit_tables
from flows.cli import tables
from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.config import parse_config
from rlhf_core.guards import NO_GRADIENT, NOT_FINITE
from rlhf_core.manifests import STAGES, ClusterRef, EvaluationRecord, IterationRecord, RetiredRecord
from rlhf_core.metrics import Mean, Std, values
from rlhf_core.records import commit_record, load_record
from rlhf_core.segments import rollout_metrics
from tasks.audit.run import audit_run
from tasks.commit import _record
from tasks.context import StageContext
from tasks.progress import load_progress
from tasks.reporting import metrics_rows, rollouts_markdown, summary_markdown
from tasks.runs import describe_run, list_runs, sample_rollouts
from tasks.summary import summarize
from tests.fixtures.whole_run import CONFIG, GROUPS, SAMPLES, Batch, Run, lengths_of

ROWS = GROUPS * SAMPLES
STEPPED = {"update/seconds": 1.0, "update/steps": 1.0, "update/grad_norm": 2.0, "update/grad_norm_max": 2.0}
IDLE = {"update/seconds": 1.0, "update/skipped_steps": 1.0}
SKIPPED = {"update/seconds": 1.0}


def same(reward, status):
    return lambda iteration: Batch(lengths_of(iteration), [reward] * ROWS, [status] * ROWS)


def empty(iteration):
    return Batch(np.zeros(ROWS, dtype=np.int64), [0.5] * ROWS, ["ok"] * ROWS)


def one_prompt(iteration):
    return Batch(np.array([2, 0, 3]), [1.0, 0.0, None], ["ok", "ok", "failed_infra"])


class Written(Run):
    """Whose records have the metrics that the stages would have recorded."""

    def generate(self, iteration, **more) -> None:
        super().generate(iteration, measure=lambda table: values(rollout_metrics(table)))

    def score(self, iteration, **more) -> None:
        batch = self.batch(iteration)
        known = [r for r in batch.rewards if r is not None]
        metrics = values({"reward/mean": Mean(sum(known), float(len(known))), "reward/std": Std.of(known)})
        metrics |= {f"reward/{s}": float(batch.status.count(s)) for s in ("failed_infra", "invalid_data")}
        super().score(iteration, metrics=metrics)

    def commit(self, iteration, **_) -> None:
        config = parse_config({**self.config, "storage": {"url": self.store.url}})
        cluster = ClusterRef(namespace="none", branch=self.lineage.head, epoch=1, trainers=(), engines=(), rewards=())
        context = StageContext(config, cluster, iteration, attempt="a1")
        stages = {name: context.stage(name) for name in STAGES[:-1]}
        assert commit_record(self.store, layout.iteration_done("r", iteration), _record(context, stages))[1]


def evaluated(run, version, **metrics):
    name = layout.version_name(version)
    record = EvaluationRecord(run="r", name=name, policy_version=version, prompts=2, metrics=metrics)
    assert commit_record(run.store, layout.evaluation("r", name), record)[1]
    return run


def ordinary_run(store):
    run = Written(store).start()
    for k in (0, 1):
        run.stages(k, *STAGES, learned=STEPPED)
    return evaluated(run, 0, **{"greedy/reward": 0.25})


def nothing_scored(store):
    run = Written(store, batch=same(None, "invalid_data")).start()
    for k in (0, 1):
        run.stages(k, *STAGES, learned=IDLE)
    # What an evaluation without any score records: no mean.
    return evaluated(evaluated(run, 0, **{"greedy/reward/invalid_data": 2.0}), 2, **{"greedy/reward/invalid_data": 2.0})


def equal_rewards(store):
    run = Written(store, batch=same(1.0, "ok")).start()
    return run.stages(0, *STAGES, learned=IDLE).stages(1, *STAGES, learned=IDLE)


def empty_responses(store):
    run = Written(store, batch=empty).start()
    return run.stages(0, *STAGES, learned=IDLE)


def one_prompt_and_none_held_out(store):
    config = {**CONFIG, "generate": {"prompts_per_iteration": 1, "samples_per_prompt": SAMPLES}}
    run = Written(store, config=config, batch=one_prompt, heldout=0).start()
    return run.stages(0, *STAGES, learned=STEPPED)


def not_scored_yet(store):
    return Written(store).start().stages(0, "generate")


def left_out(store):
    run = Written(store).start().stages(0, *STAGES, learned=STEPPED)
    return run.stages(1, *STAGES, skipped="policy/entropy is not a finite number", learned=SKIPPED)


def not_finite(store):
    run = Written(store).start().stages(0, "generate", "score")
    run.advantages(0, details={NOT_FINITE: ["policy/entropy"]})
    return run


def nothing_yet(store):
    return Written(store).start()


RUNS = [
    ordinary_run, nothing_scored, equal_rewards, empty_responses, one_prompt_and_none_held_out, not_scored_yet, left_out,
    not_finite, nothing_yet,
]  # fmt: skip


def printed(*renderables) -> str:
    console = Console(width=250, highlight=False)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    return capture.get()


def show(run):
    view = describe_run(run.store.url, "r")
    json.dumps(tables.run_as_json(view), default=str)
    return printed(tables.run_header(view), tables.iterations_table(view.stages))


def runs(run):
    return printed(tables.runs_table(list_runs(run.store.url)))


def rollouts_command(run):
    return printed(*tables.rollouts_text(sample_rollouts(run.store.url, "r", 0, ROWS)))


def audit(run):
    view = audit_run(run.store.url, "r")
    assert view.proven, view.damage
    return printed(audit_tables.facts_table(view), audit_tables.iterations_table(view.stages, None))


def artifacts(run):
    done = load_progress(run.store, run.lineage).next_iteration
    record = load_record(run.store, layout.iteration_done("r", done - 1), IterationRecord)
    markdown, count = rollouts_markdown(run.store, run.lineage, done - 1)
    return "\n".join([*(f"{r['metric']} {r['value']}" for r in metrics_rows(record.metrics)), markdown, count])


def summary(run):
    config = parse_config({**run.config, "storage": {"url": run.store.url}})
    result = summarize(config, 1.0)
    return printed(tables.summary_table(result)) + summary_markdown(result)


READERS = [show, runs, rollouts_command, audit, artifacts, summary]
#: Those that say that there is nothing to read yet.
NOTHING = {
    (nothing_yet, rollouts_command), (nothing_yet, artifacts), (not_scored_yet, artifacts), (not_finite, artifacts),
}  # fmt: skip
WORDS = {
    (ordinary_run, show): ["0.25 before, - after"],
    (ordinary_run, rollouts_command): [
        "reward none (failed_infra: broken) | exact -", "reward none (invalid_data: broken) | exact -", "(empty)",
        "reward 0.25 | exact 0.25 | advantage - | 0 tokens",
    ],
    (ordinary_run, artifacts): ["reward/mean", "update/grad_norm_max 2", "*(empty)*", "4 of 12"],
    (ordinary_run, summary): ["| learned from | each of them |"],
    (nothing_scored, show): [
        "- before, - after", "0 of 2 iterations (2: nothing was scored)", "nothing was scored (12 invalid_data)",
    ],
    (nothing_scored, rollouts_command): ["reward none (invalid_data: broken) | exact - | advantage 0"],
    (nothing_scored, audit): ["24: invalid_data"],
    (nothing_scored, artifacts): ["reward/mean -", "update/grad_norm -", "reward none (invalid_data: broken)"],
    (nothing_scored, summary): ["0 of 2 iterations (2: nothing was scored)", "sampled reward   -"],
    (equal_rewards, show): [f"0 of 2 iterations (2: {NO_GRADIENT})", NO_GRADIENT],
    (equal_rewards, artifacts): ["reward/mean 1", "reward/std 0", "update/grad_norm -"],
    (equal_rewards, summary): [f"(2: {NO_GRADIENT})"],
    (empty_responses, rollouts_command): ["response  (empty)", "0 tokens"],
    (empty_responses, artifacts): ["generate/response_length 0", "*(empty)*"],
    (empty_responses, audit): ["12: no response tokens"],
    (one_prompt_and_none_held_out, show): ["- before, - after"],
    (one_prompt_and_none_held_out, artifacts): ["3 of 3"],
    (not_scored_yet, show): ["stage score of iteration 0"],
    (not_scored_yet, rollouts_command): ["reward not scored yet", "tokens, not scored yet>"],
    (left_out, show): ["1 of 2 iterations (1: left out by a guard)"],
    (left_out, audit): ["skipped by a guard: policy/entropy is not a finite number"],
    (not_finite, show): ["nan", "advantages: policy/entropy is not a finite number"],
}  # fmt: skip


PAIRS = [(made, reader) for made in RUNS for reader in READERS if (made, reader) not in NOTHING]


@pytest.mark.parametrize(("made", "reader"), PAIRS, ids=lambda function: function.__name__)
def test_every_reader_reads_every_run(made, reader, tmp_path):
    text = reader(made(LocalObjectStore(tmp_path / "store")))
    for words in WORDS.get((made, reader), []):
        assert words in text
    assert "None" not in text
    if (made, reader) != (not_finite, show):
        assert "nan" not in text.lower()


def test_deleted_rollouts_are_said_to_be_deleted(tmp_path):
    run = ordinary_run(LocalObjectStore(tmp_path / "store"))
    record = RetiredRecord(run="r", iteration=0, retired="2026-01-02", reason="storage.keep_rollouts_hours = 1")
    assert commit_record(run.store, layout.iteration_retired("r", 0), record)[1]
    markdown, _ = rollouts_markdown(run.store, run.lineage, 0)
    assert "iteration 0 were deleted at 2026-01-02 (storage.keep_rollouts_hours = 1)" in markdown
    assert markdown.startswith("The rollouts cannot be shown")
