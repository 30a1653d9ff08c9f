"""`rlhf rerun` and `rlhf fork`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.driving import drive, store_url
from flows.cli.errors import reports_errors, say
from flows.cli.options import Overrides, RunName, StoreUrl

if TYPE_CHECKING:
    from rlhf_core.config import RunConfig

Iteration = Annotated[int, typer.Option("--iteration", min=0, metavar="K", help="Number of the iteration, from 0.")]
FromStage = Annotated[
    str, typer.Option("--from", metavar="STAGE", help="First stage to redo: generate, score, advantages, update, sync.")
]
OnlyPrepare = Annotated[bool, typer.Option("--no-train", help="Only write the branch; `rlhf resume` trains later.")]


@reports_errors
def rerun(
    run: RunName, iteration: Iteration, from_stage: FromStage, store: StoreUrl = None, no_train: OnlyPrepare = False
) -> None:
    """Redo a stage and what depends on it, as a new revision. What was there stays, as the revision before."""
    from tasks.branching import rerun as start_rerun

    config = start_rerun(store_url(store), run, iteration, from_stage)
    say(f"run {run} begins anew at stage {from_stage} of iteration {iteration}; earlier stages are shared")
    _go_on(config, no_train)


@reports_errors
def fork(
    run: RunName,
    iteration: Iteration,
    from_stage: FromStage,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the new run; made when left out.")
    ] = None,
    overrides: Overrides = None,
    store: StoreUrl = None,
    no_train: OnlyPrepare = False,
) -> None:
    """Start a new run that shares what another one committed before a stage, with other settings from there on."""
    from flows.cli.presets import new_run_name
    from tasks.branching import fork as start_fork

    name = name or new_run_name(run)
    config = start_fork(store_url(store), run, iteration, from_stage, name, overrides or [])
    say(f"run {name} goes on from stage {from_stage} of iteration {iteration} of {run}")
    _go_on(config, no_train)


def _go_on(config: RunConfig, no_train: bool) -> None:
    if no_train:
        from tasks.runs import resume_command

        say(f"continue with: {resume_command(config.run_id, config.storage.url)}")
    else:
        drive(config)
