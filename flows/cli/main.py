"""``rlhf``: the command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.audit import audit
from flows.cli.branches import fork, rerun
from flows.cli.driving import drive, store_url
from flows.cli.errors import EXIT_USER, reports_errors, say
from flows.cli.garbage import gc
from flows.cli.options import AsJson, Overrides, RunName, StoreUrl

app = typer.Typer(
    name="rlhf",
    help="RLHF as a durable workflow: every stage of every iteration is committed, any run can be resumed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
@reports_errors
def up(
    wait: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="How long to wait for the services.")] = 90.0,
    export: Annotated[bool, typer.Option("--export", help="Print variables for a shell's eval.")] = False,
) -> None:
    """Start the local services: Prefect server and worker, Ray head."""
    import shlex

    from infra.services import ServiceStack
    from infra.settings import load_settings

    stack = ServiceStack(load_settings().home)
    if not stack.status().running:
        say(f"starting the local services below {stack.layout.home}")
    addresses = stack.up(wait)
    stack.wait_for_worker(wait)
    if export:
        for name, value in addresses.environment.items():
            print(f"export {name}={shlex.quote(value)}")
        return
    print(f"Prefect UI   {addresses.ui_url}")
    print(f"Prefect API  {addresses.prefect_api_url}")
    print(f"Ray          {addresses.ray_address}")
    print(f"logs         {stack.layout.logs}")
    print('For other programs: eval "$(rlhf up --export)". To end the services: rlhf down')


@app.command()
@reports_errors
def down() -> None:
    """End the local services and everything that they started."""
    from infra.services import ServiceStack
    from infra.settings import load_settings

    stack = ServiceStack(load_settings().home)
    stack.down()
    print(f"the local services below {stack.layout.home} are down")


@app.command()
@reports_errors
def train(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A TOML file, or the name of a preset: laptop, ...")],
    overrides: Overrides = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the run; made when left out.")
    ] = None,
) -> None:
    """Train a policy. A run that exists already is continued after its last committed stage."""
    from flows.cli.presets import load_run_config

    drive(load_run_config(preset, overrides or [], run))


@app.command()
@reports_errors
def resume(
    run: RunName,
    store: StoreUrl = None,
    new_topology: Annotated[
        list[str] | None,
        typer.Option(
            "--new-topology",
            metavar="KEY=VALUE",
            help="Go on with other resources, as in --new-topology resources.trainer_ranks=4; no longer bit-identical.",
        ),
    ] = None,
) -> None:
    """Continue a run with the configuration that it was started with."""
    from tasks.branching import change_topology
    from tasks.runs import load_config_of

    if new_topology:
        change_topology(store_url(store), run, new_topology)
        say(f"run {run} goes on with another topology: from here on it is no longer bit by bit what it would have been")
    drive(load_config_of(store_url(store), run))


@app.command()
@reports_errors
def runs(store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the runs of a store."""
    from flows.cli import tables
    from tasks.runs import list_runs

    url = store_url(store)
    rows = list_runs(url)
    if as_json:
        tables.print_json(rows)
    elif rows:
        tables.stdout_console().print(tables.runs_table(rows))
    else:
        say(f"no runs in {url}")


@app.command()
@reports_errors
def show(
    run: RunName,
    store: StoreUrl = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every iteration, not the last 20.")] = False,
) -> None:
    """Show a run: its iterations and stages, key metrics, rewards, and the next step."""
    from flows.cli import tables
    from tasks.runs import describe_run

    view = describe_run(store_url(store), run, None if everything or as_json else tables.ITERATIONS_SHOWN)
    if as_json:
        tables.print_json(tables.run_as_json(view))
        return
    console = tables.stdout_console()
    console.print(tables.run_header(view))
    if view.stages:
        console.print()
        console.print(tables.iterations_table(view.stages, None if everything else tables.ITERATIONS_SHOWN))


@app.command()
@reports_errors
def rollouts(
    run: RunName,
    iteration: Annotated[int, typer.Argument(metavar="ITERATION", min=0, help="Number of the iteration.")],
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="How many samples.")] = 8,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show sampled rollouts of an iteration with their rewards."""
    from flows.cli import tables
    from tasks.runs import sample_rollouts

    samples = sample_rollouts(store_url(store), run, iteration, limit)
    if as_json:
        tables.print_json(samples)
        return
    console = tables.stdout_console()
    for block in tables.rollouts_text(samples):
        console.print(block)


@app.command()
@reports_errors
def doctor(store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Check versions, services, store, disk, memory and GPU; say what is missing and how to get it."""
    from dataclasses import asdict

    from flows.cli import tables
    from infra.doctor import run_checks

    checks = run_checks(store_url(store))
    if as_json:
        tables.print_json([asdict(check) for check in checks])
    else:
        tables.stdout_console().print(tables.checks_table(checks))
    if any(check.ok is False for check in checks):
        raise typer.Exit(EXIT_USER)


app.command()(rerun)
app.command()(fork)
app.command()(gc)
app.command()(audit)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
