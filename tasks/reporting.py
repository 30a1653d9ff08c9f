"""What the Prefect UI shows of a run: progress, metrics, samples, summary."""

from __future__ import annotations

from typing import cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from rlhf_core.config import RunConfig
from rlhf_core.manifests import IterationRecord, RunSummary, StageManifest
from rlhf_core.views import RolloutSample
from tasks.context import StageContext
from tasks.runs import sample_rollouts

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


def report_iteration(context: StageContext, record: IterationRecord, stages: dict[str, StageManifest]) -> None:
    """Metrics of the iteration as a table and a few rollouts with their rewards, on the commit task's page."""
    names = [n for n in _FIRST if n in record.metrics] + sorted(set(record.metrics) - set(_FIRST))
    create_table_artifact(
        key=artifact_key(record.run, "metrics"),
        table=[{"metric": name, "value": f"{record.metrics[name]:.6g}"} for name in names],
        description=f"iteration {record.iteration}: policy version {record.policy_version}, weights {record.weights_digest[:12]}",
    )
    samples = sample_rollouts(context.config.storage.url, record.run, record.iteration, _SAMPLES)
    create_markdown_artifact(
        key=artifact_key(record.run, "rollouts"),
        markdown="\n\n".join(_sample(s) for s in samples),
        description=f"iteration {record.iteration}: {_SAMPLES} of {stages['generate'].rows} rollouts",
    )


def report_summary(summary: RunSummary) -> None:
    """The result of the run."""
    rows = [
        ("iterations", f"{summary.iterations}"),
        ("greedy reward on held-out prompts, before", _number(summary.reward_before)),
        ("the same, after", _number(summary.reward_after)),
        ("sampled reward of the last iteration", _number(summary.sampled_reward_last)),
        ("generated tokens a second", _number(summary.tokens_per_second)),
        ("seconds", f"{summary.seconds:.0f}"),
        ("export", summary.export or "none"),
        *((f"seconds of {stage}, mean", f"{seconds:.2f}") for stage, seconds in summary.stage_seconds.items()),
    ]
    lines = [f"# Run {summary.run}", "", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    create_markdown_artifact(
        key=artifact_key(summary.run, "summary"), markdown="\n".join(lines), description=f"result of {summary.run}"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _sample(sample: RolloutSample) -> str:
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    quote = sample.response.replace("\n", "\n> ")
    return (
        f"**{sample.sample_id}** reward {reward}, expected `{sample.answer}`, {sample.tokens} tokens, "
        f"{sample.finish_reason}\n\n{sample.prompt}\n\n> {quote}"
    )
