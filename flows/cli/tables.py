"""Tables for people and JSON for programs, made from the values in ``rlhf_core.views``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_core.manifests import STAGES, RunSummary
from rlhf_core.views import IterationView, RolloutSample, RunRow, RunView, reward_text

if TYPE_CHECKING:
    from infra.doctor import Check

#: Iterations that `show` prints unless asked for all.
ITERATIONS_SHOWN = 20
#: Metrics worth a column, in order, with their headings; those that no iteration has are left out.
METRIC_COLUMNS = {
    "reward/mean": "reward",
    "reward/std": "± std",
    "generate/response_length": "length",
    "policy/entropy": "entropy",
    "policy/reference_kl": "KL",
    "update/grad_norm": "grad norm",
    "mismatch/log_ratio_abs": "logprob gap",
    "generate/tokens_per_second": "tokens/s",
}


def print_json(value: Any) -> None:
    """JSON to stdout; NaN and infinities become null, which JSON can hold."""
    sys.stdout.write(to_json(value, indent=2, inf_nan_mode="null").decode() + "\n")


def run_as_json(view: RunView) -> dict[str, Any]:
    """The keys of ``show --json``: ``iterations`` is the list of iterations, ``iterations_planned`` their number."""
    fields = view.model_dump()
    stages = fields.pop("stages")
    return {**fields, "iterations_planned": fields["iterations"], "iterations": stages}


def runs_table(rows: Sequence[RunRow]) -> Table:
    """One line a run."""
    table = _table("run", "created", "state", "iterations", "reward", "held-out before", "after", left=3)
    for row in rows:
        table.add_row(
            Text(row.run),
            Text(row.created.astimezone().strftime("%Y-%m-%d %H:%M") if row.created else "-"),
            Text(row.state),
            f"{row.iterations_done}/{row.iterations}",
            *(_number(value) for value in (row.reward_last, row.reward_before, row.reward_after)),
        )
    return table


def run_header(view: RunView) -> Table:
    """The figures of a run, one a line."""
    return _facts(
        ("run", view.run),
        ("state", view.state),
        ("iterations", f"{view.iterations_done} of {view.iterations}"),
        ("policy version", str(view.policy_version)),
        ("held-out reward", f"{_number(view.reward_before)} before, {_number(view.reward_after)} after"),
        ("tokens/s", _number(view.tokens_per_second)),
        *((("learned from", view.learned),) if view.learned is not None else ()),
        ("exported to", view.export or "-"),
        *([("prompts dropped", f"{view.prompts_dropped}, too long")] if view.prompts_dropped else []),
        *(("lineage" if n == 0 else "", line) for n, line in enumerate(view.lineage)),
        *(("not exact", line) for line in view.replayed),
        ("next", view.next_step),
    )


def iterations_table(iterations: Sequence[IterationView], limit: int | None = ITERATIONS_SHOWN) -> Table:
    """One line an iteration: seconds of every committed stage, then the metrics. ``limit`` keeps the newest ones."""
    shown = iterations if limit is None else iterations[-limit:] if limit else []
    names = {name: None for view in iterations for name in view.stage_states}
    stages = [*(name for name in STAGES if name in names), *(name for name in names if name not in STAGES)]
    present = {name for view in shown for name in view.metrics}
    columns = {key: title for key, title in METRIC_COLUMNS.items() if key in present}
    notes = any(view.note for view in shown)
    table = _table("iteration", *stages, *columns.values(), left=0)
    if notes:
        table.add_column("note", overflow="fold")
    total = iterations[-1].iteration + 1 if iterations else 0
    if len(shown) < total:
        table.caption = f"the last {len(shown)} of {total} iterations; --all shows every one"
    for view in shown:
        table.add_row(
            str(view.iteration),
            *(_stage(view, stage) for stage in stages),
            *(_number(view.metrics.get(key)) for key in columns),
            *((Text(view.note or ""),) if notes else ()),
        )
    return table


def rollouts_text(samples: Iterable[RolloutSample]) -> Iterable[Text]:
    """Each rollout as a block: a line of figures, the prompt, the response."""
    for sample in samples:
        figures = [
            f"reward {printable(reward_text(sample))}",
            *(f"{name} {_number(value)}" for name, value in sample.components.items()),
            f"advantage {_number(sample.advantage)}",
            f"{sample.tokens} tokens, {sample.finish_reason}",
        ]
        text = Text.assemble((printable(sample.sample_id), "bold"), "  ", " | ".join(figures), "\n")
        text.append(_indented("prompt  ", sample.prompt), style="dim")
        if sample.answer is not None:
            text.append(_indented("answer  ", sample.answer), style="dim")
        text.append(_indented("response", sample.response or "(empty)"), style="" if sample.response else "italic")
        yield text


def summary_table(summary: RunSummary) -> Table:
    """The result of a finished run."""
    seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in summary.stage_seconds.items())
    return _facts(
        ("run", summary.run),
        ("iterations", str(summary.iterations)),
        ("policy version", str(summary.policy_version)),
        *((("learned from", summary.learned),) if summary.learned is not None else ()),
        ("held-out reward", f"{_number(summary.reward_before)} before, {_number(summary.reward_after)} after"),
        ("sampled reward", _number(summary.sampled_reward_last)),
        ("tokens/s", _number(summary.tokens_per_second)),
        ("seconds a stage", seconds or "-"),
        ("seconds in all", f"{summary.seconds:.1f}"),
        ("exported to", summary.export or "-"),
    )


def checks_table(checks: Sequence[Check]) -> Table:
    """The findings of ``rlhf doctor``."""
    table = _table("", "check", "found", "what to do", left=4)
    marks = {True: Text("ok", "green"), False: Text("FAIL", "bold red"), None: Text("warn", "yellow")}
    for check in checks:
        table.add_row(marks[check.ok], Text(check.name), Text(check.found), Text("" if check.ok else check.fix))
    return table


def printable(text: str) -> str:
    """Text of a model or a user without control characters, which could rewrite the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def stdout_console() -> Console:
    """Rich on stdout. Into a file or a pipe it does not cut tables at 80 columns."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def _table(*columns: str, left: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        # Words may wrap, figures may not.
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index >= left, overflow="fold")
    return table


def _facts(*facts: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def _stage(view: IterationView, stage: str) -> str:
    if view.stage_states.get(stage) != "committed":
        return "-"
    seconds = view.stage_seconds.get(stage)
    return "done" if seconds is None else f"{seconds:.1f} s"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if value else "0"


def _indented(label: str, text: str) -> str:
    first, *rest = printable(text).split("\n")
    return "\n".join([f"  {label}  {first}", *(f"  {'':8}  {line}" for line in rest)]) + "\n"
