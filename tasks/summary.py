"""The result of a run, from its records."""

from __future__ import annotations

from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.guards import lessons
from rlhf_core.lineage import load_lineage
from rlhf_core.manifests import EvaluationRecord, ExportRecord, IterationRecord, RunSummary
from rlhf_core.records import find_record
from tasks.context import open_run_store
from tasks.progress import load_progress
from tasks.runs import evaluations, iteration_records


def summarize(config: RunConfig, seconds: float) -> RunSummary:
    """What `rlhf train` prints at the end. ``seconds`` is the time this driver took."""
    store, run = open_run_store(config), config.run_id
    lineage = load_lineage(store, run)
    progress = load_progress(store, lineage)
    done = iteration_records(store, lineage, progress.next_iteration)
    before, after = evaluations(store, lineage, progress.next_iteration)
    export = find_record(
        store, layout.export(lineage.head, f"{layout.version_name(progress.policy_version)}.json"), ExportRecord
    )
    return RunSummary(
        run=run,
        iterations=progress.next_iteration,
        policy_version=progress.policy_version,
        learned=lessons([r.metrics for r in done]),
        reward_before=_metric(before, "greedy/reward"),
        reward_after=_metric(after, "greedy/reward"),
        sampled_reward_last=done[-1].metrics.get("reward/mean") if done else None,
        tokens_per_second=_mean([r.metrics.get("generate/tokens_per_second") for r in done]),
        seconds=seconds,
        stage_seconds=_stage_means(done),
        export=export.folder if export else None,
        evaluation={name: r.metrics for name, r in (("before", before), ("after", after)) if r is not None},
    )


def _metric(record: EvaluationRecord | None, name: str) -> float | None:
    return record.metrics.get(name) if record is not None else None


def _mean(numbers: list[float | None]) -> float | None:
    known = [n for n in numbers if n is not None]
    return sum(known) / len(known) if known else None


def _stage_means(done: list[IterationRecord]) -> dict[str, float]:
    names = list(done[0].stage_seconds) if done else []
    return {name: sum(r.stage_seconds[name] for r in done) / len(done) for name in names}
