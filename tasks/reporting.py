"""What the Prefect UI shows of a run: progress, metrics, samples, summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from rlhf_core.config import RunConfig
from rlhf_core.errors import IntegrityError, NotCommitted
from rlhf_core.guards import lesson
from rlhf_core.lineage import Lineage
from rlhf_core.manifests import IterationRecord, RunSummary
from rlhf_core.ports import ObjectStore
from rlhf_core.views import RolloutSample, reward_text
from tasks.runs import first_samples, rollout_stages

#: Rollouts shown for an iteration.
_SAMPLES = 4

#: The metrics at the top of an iteration's table.
_FIRST = ("reward/mean", "reward/std", "policy/entropy", "update/grad_norm", "mismatch/log_ratio_abs")


def artifact_key(run: str, what: str) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in f"{run}-{what}".lower())


def start_progress(config: RunConfig, done: int) -> UUID:
    """A progress bar of the whole run, on the flow run's page."""
    description = f"iterations of {config.run_id}"
    return cast(UUID, create_progress_artifact(100.0 * done / config.iterations, description=description))


def show_progress(artifact: UUID, config: RunConfig, done: int) -> None:
    """Move the bar."""
    update_progress_artifact(artifact, progress=100.0 * done / config.iterations)


def report_iteration(store: ObjectStore, lineage: Lineage, record: IterationRecord) -> None:
    """Metrics of the iteration as a table and a few rollouts with their rewards, on the page of the task that calls this."""
    note = lesson(record.metrics)
    what = f"iteration {record.iteration}: policy version {record.policy_version}, weights {record.weights_digest[:12]}"
    create_table_artifact(
        key=artifact_key(record.run, "metrics"),
        table=metrics_rows(record.metrics),
        description=what if note is None else f"{what}; {note}",
    )
    markdown, count = rollouts_markdown(store, lineage, record.iteration)
    create_markdown_artifact(
        key=artifact_key(record.run, "rollouts"),
        markdown=markdown,
        description=f"iteration {record.iteration}: {count} rollouts",
    )


def metrics_rows(metrics: Mapping[str, float]) -> list[dict[str, str]]:
    """Metrics as rows of a table, the most important ones first; ``-`` for one of these that the iteration does not have."""
    names = [*_FIRST, *sorted(set(metrics) - set(_FIRST))]
    return [{"metric": name, "value": f"{metrics[name]:.6g}" if name in metrics else "-"} for name in names]


def rollouts_markdown(store: ObjectStore, lineage: Lineage, iteration: int) -> tuple[str, str]:
    """A few rollouts of the iteration, and how many of how many they are. Rows that are damaged or deleted are said to be so."""
    try:
        stages = rollout_stages(store, lineage, iteration)
        samples = first_samples(store, lineage.record, stages, _SAMPLES)
    except (IntegrityError, NotCommitted) as error:
        return f"The rollouts cannot be shown: {error}", "no"
    return "\n\n".join(_sample(s) for s in samples), f"{len(samples)} of {stages[0].rows}"


def report_summary(summary: RunSummary) -> None:
    """The result of the run."""
    create_markdown_artifact(
        key=artifact_key(summary.run, "summary"),
        markdown=summary_markdown(summary),
        description=f"result of {summary.run}",
    )


def summary_markdown(summary: RunSummary) -> str:
    """The summary as a page with a table."""
    rows = [
        ("iterations", f"{summary.iterations}"),
        ("learned from", summary.learned or "each of them"),
        ("greedy reward on held-out prompts, before", _number(summary.reward_before)),
        ("the same, after", _number(summary.reward_after)),
        ("sampled reward of the last iteration", _number(summary.sampled_reward_last)),
        ("generated tokens a second", _number(summary.tokens_per_second)),
        ("seconds", f"{summary.seconds:.0f}"),
        ("export", summary.export or "none"),
        *((f"seconds of {stage}, mean", f"{seconds:.2f}") for stage, seconds in summary.stage_seconds.items()),
    ]
    lines = [f"# Run {summary.run}", "", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _sample(sample: RolloutSample) -> str:
    quote = sample.response.replace("\n", "\n> ") or "*(empty)*"
    return (
        f"**{sample.sample_id}** reward {reward_text(sample)}, expected `{sample.answer}`, {sample.tokens} tokens, "
        f"{sample.finish_reason}\n\n{sample.prompt}\n\n> {quote}"
    )
