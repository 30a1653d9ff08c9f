"""What is known of runs, read from the store: for the command line, and for whoever resumes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from infra.object_store import open_store
from rlhf_core import layout
from rlhf_core.bases import base_keys, describe_base
from rlhf_core.buffer import read_rows
from rlhf_core.config import RunConfig, stored_config
from rlhf_core.config.place import StorageConfig
from rlhf_core.errors import NotCommitted, StoreError
from rlhf_core.guards import NOT_FINITE, lesson, lessons, not_finite
from rlhf_core.lineage import Lineage, load_lineage
from rlhf_core.manifests import (
    STAGES,
    BaseRecord,
    EvaluationRecord,
    ExportRecord,
    IterationRecord,
    RetiredRecord,
    RunRecord,
    StageManifest,
)
from rlhf_core.metric_names import of_iteration
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.table import PromptTable
from rlhf_core.records import find_record, load_record
from rlhf_core.schema import COMPONENT
from rlhf_core.views import IterationView, RolloutSample, RunRow, RunView
from tasks.progress import load_progress, next_stage, planned_iterations

#: Small objects read at once.
_READERS = 16


def load_config_of(store_url: str, run: str) -> RunConfig:
    """The configuration that the run was started with. NotCommitted if there is no such run."""
    store = open_named_store(store_url)
    lineage = load_lineage(store, run)
    config = stored_config(lineage.record)
    storage = config.storage.model_copy(update={"url": store_url})
    return config.model_copy(update={"run": run, "storage": storage, "iterations": planned_iterations(store, lineage)})


def list_runs(store_url: str) -> list[RunRow]:
    """All runs of the store, newest first."""
    store = open_named_store(store_url)
    folders = [name for name in store.folders("runs") if "~" not in name]
    names = [name for name in folders if store.exists(layout.run_record(name))]
    return sorted((_row(store, run) for run in names), key=lambda row: (str(row.created), row.run), reverse=True)


def describe_run(store_url: str, run: str, newest: int | None = None) -> RunView:
    """Everything that `rlhf show` shows; of the finished iterations only the ``newest`` ones are read, all for None."""
    store = open_named_store(store_url)
    lineage = load_lineage(store, run)
    progress = load_progress(store, lineage)
    first = 0 if newest is None else max(0, progress.next_iteration - newest)
    done = iteration_records(store, lineage, progress.next_iteration, first)
    views = [
        IterationView(
            iteration=r.iteration,
            stage_states=dict.fromkeys(STAGES, "committed"),
            stage_seconds=r.stage_seconds,
            metrics=r.metrics,
            note=lesson(r.metrics),
        )
        for r in done
    ]
    planned = planned_iterations(store, lineage)
    started = _open_stages(store, lineage, progress.next_iteration) if progress.next_iteration < planned else {}
    if started:
        views.append(_unfinished(progress.next_iteration, started))
    before, after = evaluations(store, lineage, planned)
    export = find_record(store, layout.export(lineage.head, f"{layout.version_name(planned)}.json"), ExportRecord)
    speeds = [r.metrics["generate/tokens_per_second"] for r in done if "generate/tokens_per_second" in r.metrics]
    return RunView(
        run=run,
        state=_state(progress.next_iteration, planned, after, export, started),
        policy_version=progress.policy_version,
        iterations=planned,
        iterations_done=progress.next_iteration,
        reward_before=_greedy(before),
        reward_after=_greedy(after),
        tokens_per_second=sum(speeds) / len(speeds) if speeds else None,
        export=export.folder if export else None,
        learned=lessons([r.metrics for r in done]),
        prompts_dropped=dropped.rows if (dropped := lineage.record.prompts.dropped) else 0,
        next_step=_next_step(resume_command(run, store_url), progress.next_iteration, planned, export, started),
        stages=tuple(views),
        lineage=tuple(_origin(record) for record in lineage.records if record.parent is not None),
        replayed=tuple(_replays(store, lineage)),
    )


def _replays(store: ObjectStore, lineage: Lineage) -> Iterator[str]:
    for key in base_keys(store, lineage):
        base = find_record(store, key, BaseRecord)
        if base is not None and base.reason:
            yield describe_base(base)


def _origin(record: RunRecord) -> str:
    """Where a branch begins, e.g. ``r~1: from score of iteration 3 of r``."""
    parent = record.parent
    return (
        f"{record.run}: from {parent.stage} of iteration {parent.iteration} of {parent.run}" if parent else record.run
    )


def position_of(store: ObjectStore, run: str) -> tuple[int, str]:
    """Finished iterations of the run, and the stage that comes next. NotCommitted if there is no such run."""
    return next_stage(store, load_lineage(store, run))


def sample_rollouts(store_url: str, run: str, iteration: int, limit: int) -> list[RolloutSample]:
    """The first rollouts of an iteration, as text, with what the later stages made of them.

    NotCommitted if nothing was generated, or the rollouts were deleted on purpose.
    """
    store = open_named_store(store_url)
    lineage = load_lineage(store, run)
    return first_samples(store, lineage.record, rollout_stages(store, lineage, iteration), limit)


def rollout_stages(store: ObjectStore, lineage: Lineage, iteration: int) -> list[StageManifest]:
    """The committed stages that rows of rollouts consist of. Errors as in ``sample_rollouts``."""
    stages = [lineage.load(store, iteration, "generate")]
    gone = find_record(store, layout.iteration_retired(stages[0].run, iteration), RetiredRecord)
    if gone is not None:
        raise NotCommitted(f"the rollouts of iteration {iteration} were deleted at {gone.retired} ({gone.reason})")
    for name in ("score", "advantages"):
        found = lineage.find(store, iteration, name)
        if found is None:
            break
        stages.append(found)
    return stages


def first_samples(
    store: ObjectStore, record: RunRecord, stages: list[StageManifest], limit: int
) -> list[RolloutSample]:
    """The first rows of these stages of an iteration, as text."""
    table = read_rows(store, stages, rows=range(min(limit, stages[0].rows)))
    prompts = PromptTable(store, record.prompts.train).by_id(table["prompt_id"].to_pylist())
    samples = []
    for row, prompt in zip(table.to_pylist(), prompts, strict=True):
        components = {k.removeprefix(COMPONENT): v for k, v in row.items() if k.startswith(COMPONENT)}
        advantages = row.get("advantages")
        samples.append(
            RolloutSample(
                sample_id=row["sample_id"],
                prompt=prompt["prompt_text"],
                response=row["response_text"] if "response_text" in row else _unread(row),
                status=row.get("status"),
                error=row.get("error"),
                reward=row.get("reward"),
                components=components,
                answer=prompt["answer"],
                finish_reason=row["finish_reason"],
                tokens=len(row["response_ids"]),
                advantage=advantages[0] if advantages else None,
            )
        )
    return samples


def _unread(row: dict[str, Any]) -> str:
    """Responses become text where they are scored."""
    return f"<{len(row['response_ids'])} tokens, not scored yet>"


def evaluations(
    store: ObjectStore, lineage: Lineage, last: int
) -> tuple[EvaluationRecord | None, EvaluationRecord | None]:
    """The evaluations of the starting policy and of version ``last``."""
    keys = [layout.evaluation(lineage.branch_of_version(v), layout.version_name(v)) for v in (0, last)]
    found = [find_record(store, key, EvaluationRecord) for key in keys]
    return found[0], found[1]


def iteration_records(store: ObjectStore, lineage: Lineage, count: int, first: int = 0) -> list[IterationRecord]:
    """The records of iterations ``first`` .. count - 1."""
    with ThreadPoolExecutor(_READERS) as pool:
        keys = [layout.iteration_done(lineage.branch_of(k, "commit"), k) for k in range(first, count)]
        return list(pool.map(lambda key: load_record(store, key, IterationRecord), keys))


def open_named_store(store_url: str) -> Any:
    """The store at this URL. StoreError if it is none."""
    try:
        return open_store(store_url)
    except ValueError as error:
        raise StoreError(f"store {store_url!r}: {error}") from None


def resume_command(run: str, store_url: str) -> str:
    """What continues the run, for people to copy."""
    store = f" --store {store_url}" if store_url != StorageConfig().url else ""
    return f"rlhf resume {run}{store}"


def _row(store: ObjectStore, run: str) -> RunRow:
    lineage = load_lineage(store, run)
    progress = load_progress(store, lineage)
    planned = planned_iterations(store, lineage)
    before, after = evaluations(store, lineage, planned)
    last = None
    if progress.next_iteration:
        newest = progress.next_iteration - 1
        done = load_record(store, layout.iteration_done(lineage.branch_of(newest, "commit"), newest), IterationRecord)
        last = done.metrics.get("reward/mean")
    export = find_record(store, layout.export(lineage.head, f"{layout.version_name(planned)}.json"), ExportRecord)
    return RunRow(
        run=run,
        created=datetime.fromisoformat(lineage.records[-1].created),
        iterations_done=progress.next_iteration,
        iterations=planned,
        state=_state(progress.next_iteration, planned, after, export, {}),
        reward_last=last,
        reward_before=_greedy(before),
        reward_after=_greedy(after),
    )


def _open_stages(store: ObjectStore, lineage: Lineage, iteration: int) -> dict[str, StageManifest]:
    found = {name: lineage.find(store, iteration, name) for name in STAGES if name != "commit"}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def _unfinished(iteration: int, stages: dict[str, StageManifest]) -> IterationView:
    metrics = of_iteration(stages)
    notes = [reason for reason in (lesson(metrics), *not_finite(*stages.values())) if reason is not None]
    return IterationView(
        iteration=iteration,
        stage_states={name: "committed" if name in stages else "missing" for name in STAGES},
        stage_seconds={name: m.seconds for name, m in stages.items()},
        metrics=metrics | {name: math.nan for m in stages.values() for name in m.details.get(NOT_FINITE, ())},
        note="; ".join(notes) or None,
    )


def _greedy(record: EvaluationRecord | None) -> float | None:
    return record.metrics.get("greedy/reward") if record else None


def _state(done: int, planned: int, after: Any, export: Any, started: dict[str, StageManifest]) -> str:
    if done >= planned and export is not None:
        return "complete"
    return "started" if done or started else "new"


def _next_step(resume: str, done: int, planned: int, export: Any, started: dict[str, StageManifest]) -> str:
    if done >= planned:
        if export is None:
            return f"evaluation and export are missing: {resume}"
        return f"nothing: use {export.folder}"
    missing = next((name for name in STAGES if name not in started), "commit")
    return f"stage {missing} of iteration {done}: {resume}"
