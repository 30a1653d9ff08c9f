"""``rlhf audit``: prove a run from its store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.driving import store_url
from flows.cli.errors import EXIT_STATE, reports_errors
from flows.cli.options import AsJson, RunName, StoreUrl

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from rlhf_core.views import AuditView, Damage, EpochUse, IterationAudit

#: Damaged objects that are printed; --json has all of them.
DAMAGE_SHOWN = 50


@reports_errors
def audit(
    run: RunName,
    store: StoreUrl = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every iteration, not the last 20.")] = False,
) -> None:
    """Verify every object of a run and account for every sample; exit code 3 if anything is damaged."""
    from flows.cli import tables

    view = _with_progress(store_url(store), run)
    if as_json:
        tables.print_json(view)
    else:
        console = tables.stdout_console()
        console.print(facts_table(view))
        if view.stages:
            console.print()
            console.print(iterations_table(view.stages, None if everything else tables.ITERATIONS_SHOWN))
        for block in damage_text(view.damage):
            console.print(block, soft_wrap=True)
    if not view.proven:
        raise typer.Exit(EXIT_STATE)


def _with_progress(store: str, run: str) -> AuditView:
    """An audit reads everything, which takes a while: a terminal shows how far it is."""
    from rich.console import Console

    from tasks.audit.run import audit_run

    console = Console(stderr=True)
    if not console.is_terminal:
        return audit_run(store, run)
    with console.status(f"auditing {run}") as status:
        return audit_run(store, run, lambda done, count: status.update(f"auditing {run}: iteration {done} of {count}"))


def facts_table(view: AuditView) -> Table:
    """What was read and what came of the samples, one figure a line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    verdict = Text("everything is proven", "green") if view.proven else Text(f"{len(view.damage)} damaged", "bold red")
    retired = f", {view.objects_retired} retired" if view.objects_retired else ""
    lost = {"waiting for their update": view.waiting, "in retired rows": view.retired, "unproven": view.unproven}
    table.add_row("run", Text(view.run))
    table.add_row("verdict", verdict)
    if len(view.branches) > 1:
        table.add_row("branches", Text(" <- ".join(view.branches)))
    table.add_row("iterations", f"{view.iterations_done} of {view.iterations}{open_stages(view)}")
    table.add_row("records", f"{view.records:,} verified")
    table.add_row("objects", f"{view.objects:,} verified ({view.bytes / 2**20:,.1f} MiB){retired}")
    table.add_row("prompts", f"{view.prompts:,} drawn{epochs_text(view.epochs)}")
    table.add_row("samples", f"{view.samples:,} with {view.tokens:,} response tokens")
    table.add_row("trained", f"{view.trained:,}")
    for reason, samples in sorted(view.left_out.items(), key=lambda item: -item[1]):
        table.add_row("left out", f"{samples:,}: {reason}")
    for what, samples in lost.items():
        if samples:
            table.add_row("", f"{samples:,} {what}")
    for line in view.replayed:
        table.add_row("not exact", Text(line, "yellow"))
    table.add_row("checkpoints", ", ".join(f"version {version}" for version in view.checkpoints[-8:]) or "-")
    return table


def open_stages(view: AuditView) -> str:
    """Where an unfinished iteration stands, e.g. ``; iteration 3 lacks sync, commit``."""
    last = view.stages[-1] if view.stages else None
    missing = [stage for stage, state in last.states.items() if state == "open"] if last is not None else []
    return f"; iteration {last.iteration} still lacks {', '.join(missing)}" if last is not None and missing else ""


def epochs_text(epochs: tuple[EpochUse, ...]) -> str:
    """How evenly the prompts were used: once an epoch, and never twice in one that is under way."""
    if not epochs:
        return ""
    even = [use for use in epochs if use.least == use.most == 1]
    odd = [use for use in epochs if use not in even]
    parts = [f"each exactly once in {len(even)} of {len(epochs)} epochs"] if even else []
    parts += [
        f"epoch {use.epoch}: {use.used} of {use.prompts}, each {use.least} to {use.most} times" for use in odd[-3:]
    ]
    return f"; {'; '.join(parts)}"


def iterations_table(iterations: tuple[IterationAudit, ...], limit: int | None) -> Table:
    """One line an iteration: the state of every stage, then its samples. ``limit`` keeps the newest and the damaged ones."""
    from rich.table import Table
    from rich.text import Text

    from rlhf_core.manifests import STAGES

    first = 0 if limit is None else len(iterations) - limit
    shown = [
        row
        for place, row in enumerate(iterations)
        if place >= first or {"damaged", "missing"} & set(row.states.values())
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("iteration", *STAGES, "prompts", "samples", "tokens", "trained", "left out"):
        table.add_column(name, justify="left" if name in STAGES else "right", no_wrap=True)
    table.add_column("note", overflow="fold")
    if len(shown) < len(iterations):
        table.caption = f"{len(shown)} of {len(iterations)} iterations; --all shows every one"
    for row in shown:
        notes = [f"{', '.join(stages)} shared with {branch}" for branch, stages in _by_branch(row).items()]
        notes += [f"skipped by a guard: {row.skipped}"] if row.skipped is not None else []
        table.add_row(
            str(row.iteration),
            *(_state(row.states[stage]) for stage in STAGES),
            *(
                f"{value:,}"
                for value in (row.prompts, row.samples, row.tokens, row.trained, sum(row.left_out.values()))
            ),
            Text("; ".join(notes)),
        )
    return table


def damage_text(damage: tuple[Damage, ...]) -> Iterator[Text]:
    """Each damaged object as a block: its key, what is wrong, what it can be rebuilt from."""
    from rich.text import Text

    from flows.cli.tables import printable

    for item in damage[:DAMAGE_SHOWN]:
        where = f" (iteration {item.iteration}, {item.stage})" if item.stage is not None else ""
        text = Text.assemble("\n", (f"{item.kind} ", "bold red"), (printable(item.key), "bold"), where)
        text.append(f"\n  {printable(item.problem)}\n  -> {printable(item.remedy)}")
        yield text
    if len(damage) > DAMAGE_SHOWN:
        yield Text(f"\nand {len(damage) - DAMAGE_SHOWN} more; --json lists all of them")


def _by_branch(row: IterationAudit) -> dict[str, list[str]]:
    branches: dict[str, list[str]] = {}
    for stage, branch in row.shared.items():
        branches.setdefault(branch, []).append(stage)
    return branches


def _state(state: str) -> Text:
    from rich.text import Text

    styles = {"damaged": "bold red", "missing": "bold red", "open": "dim", "retired": "dim"}
    return Text({"intact": "ok", "open": "-"}.get(state, state), styles.get(state, ""))
