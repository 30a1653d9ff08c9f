"""Driving a run from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from flows.cli.errors import EXIT_INTERRUPTED, say, shorten_console

if TYPE_CHECKING:
    from rlhf_core.config import RunConfig


def store_url(url: str | None) -> str:
    """The store that a command works on."""
    if url is not None:
        from rlhf_core.config.base import expand_home

        return expand_home(url)
    from rlhf_core.config.place import StorageConfig

    return StorageConfig().url


def drive(config: RunConfig) -> None:
    """Check, bring up or find the services, train, print the result."""
    from tasks.preflight import check_before_start

    check_before_start(config)
    try:
        from flows.cli.session import open_session

        session = open_session(say)
        say(f"run {config.run_id}: watch it at {session.ui_url}")
        # Only now: Prefect and Ray read the environment when they are imported.
        from flows.cli.bars import run_bar
        from flows.train_rlhf import train_rlhf

        shorten_console()
        with run_bar(config):
            while not (summary := train_rlhf(config)).finished:
                pass  # a flow run of bounded length has ended; the next one goes on
    except KeyboardInterrupt:
        from tasks.runs import resume_command

        command = resume_command(config.run_id, config.storage.url)
        say(f"rlhf: interrupted; what is committed is kept. Continue with: {command}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    from flows.cli import tables

    tables.stdout_console().print(tables.summary_table(summary))
    if session.local:
        say(f"the UI stays at {session.ui_url} until `rlhf down`")
