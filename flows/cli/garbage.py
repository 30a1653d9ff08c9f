"""``rlhf gc``: delete what killed processes of a run left behind."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.driving import store_url
from flows.cli.errors import reports_errors, say
from flows.cli.options import RunName, StoreUrl

if TYPE_CHECKING:
    from rich.table import Table

    from tasks.garbage.collect import Garbage

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@reports_errors
def gc(
    run: RunName,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    store: StoreUrl = None,
    grace_hours: Annotated[
        float,
        typer.Option("--grace-hours", min=0, metavar="H", help="Leave alone what nobody committed and is younger."),
    ] = 1.0,
) -> None:
    """Delete what killed processes left behind: lost attempts, partial uploads, local files, actors."""
    from infra.settings import load_settings
    from rlhf_core.lineage import load_lineage
    from tasks.runs import open_named_store

    opened = open_named_store(store_url(store))
    load_lineage(opened, run)  # a wrong name is reported before anything is connected to
    ray = _join_ray()
    # Only now: Ray reads the environment when it is imported.
    from tasks.garbage.collect import collect, find_garbage, ray_answers

    ray = ray and ray_answers(opened.url)
    if not ray:
        say("no Ray cluster: actors are not looked for")
    garbage = find_garbage(opened, run, grace_hours * 3600, home=load_settings().home, ray=ray)
    if garbage.driver is not None:
        say(f"rlhf: {garbage.driver}. Until then only what no driver can need is deleted")
    if garbage.items and not dry_run:
        collect(opened, garbage)
    _report(garbage, dry_run)


def _join_ray() -> bool:
    """Make this process find the Ray cluster that RAY_ADDRESS names, or the local one. Starts nothing."""
    from infra.services import Service, ServiceStack
    from infra.services.health import accepts_connections
    from infra.settings import load_settings

    settings = load_settings()
    if settings.ray_address:
        return accepts_connections(settings.ray_address)
    healthy = {row.service for row in ServiceStack(settings.home).status().services if row.healthy}
    if not {Service.RAY, Service.PREFECT} <= healthy:
        return False
    from flows.cli.session import open_session

    open_session(say)
    return True


def _report(garbage: Garbage, dry_run: bool) -> None:
    from flows.cli import tables

    if garbage.items:
        print(f"{'would be deleted' if dry_run else 'deleted'} from run {garbage.run}:")
        tables.stdout_console().print(_table(garbage))
    else:
        print(f"nothing to delete from run {garbage.run}")
    for reason, count in sorted(garbage.spared.items()):
        print(f"left alone: {count} x {reason}")


def _table(garbage: Garbage) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kind", "count", "bytes", "reason"):
        table.add_column(column, justify="right" if column in ("count", "bytes") else "left", overflow="fold")
    ordered = sorted(garbage.items, key=lambda item: (item.kind, item.reason))
    for (kind, reason), members in groupby(ordered, key=lambda item: (item.kind, item.reason)):
        sizes = [item.bytes for item in members]
        table.add_row(kind, str(len(sizes)), _readable(sum(sizes)), reason)
    return table


def _readable(size: int) -> str:
    value, unit = float(size), _UNITS[0]
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
