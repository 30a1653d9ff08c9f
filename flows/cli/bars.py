"""A bar on the terminal that follows a run; nothing where the output is no terminal."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from rlhf_core.config import RunConfig

_PAUSE_SECONDS = 2.0


@contextmanager
def run_bar(config: RunConfig) -> Iterator[None]:
    """Show finished iterations and the stage under way below the log while the body runs.

    The bar reads the store, as `rlhf show` does, so that it tells the same on a run that was continued.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[stage]}"),
        TimeElapsedColumn(),
    )
    ended = threading.Event()
    with Progress(*columns, console=_log_console()) as progress:
        bar = progress.add_task(config.run_id, total=config.iterations, stage="starting")
        follower = threading.Thread(target=_follow, args=(progress, bar, config, ended), daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()


def _follow(progress: Progress, bar: TaskID, config: RunConfig, ended: threading.Event) -> None:
    from rlhf_core.errors import RLHFError
    from tasks.runs import open_named_store, position_of

    store = open_named_store(config.storage.url)
    while not ended.wait(_PAUSE_SECONDS):
        try:
            done, stage = position_of(store, config.run_id)
        except (OSError, RLHFError):
            continue  # the flow meets the same trouble and reports it; a bar must not
        progress.update(bar, completed=done, stage=stage)


def _log_console() -> Console:
    """The console that Prefect logs to: lines that pass through it do not tear the bar."""
    from rich.console import Console

    for handler in logging.getLogger("prefect").handlers:
        console = getattr(handler, "console", None)
        if isinstance(console, Console):
            return console
    return Console(stderr=True)
