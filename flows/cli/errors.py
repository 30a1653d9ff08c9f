"""How a command ends: one message and an exit code for what is expected, a traceback for what is not."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

from rlhf_core.errors import RLHFError, UserError

#: Bad input or a service that cannot be started: change something and try again.
EXIT_USER = 2
#: A worker failed, or the run or its data is not in the state that the command needs: look, then resume.
EXIT_STATE = 3
#: Ended by Ctrl-C, as shells count it (128 + SIGINT).
EXIT_INTERRUPTED = 130

P = ParamSpec("P")


def exit_code_of(error: BaseException) -> int | None:
    """The exit code of an expected error, None for one that deserves its traceback."""
    if isinstance(error, UserError):
        return EXIT_USER
    if isinstance(error, RLHFError):
        return EXIT_STATE
    if isinstance(error, OSError):
        from infra.services.errors import ServiceError  # late: no command pays for it unless something failed

        return EXIT_USER if isinstance(error, ServiceError) else None
    return None


def say(message: str) -> None:
    """One message for people on stderr."""
    print(message, file=sys.stderr, flush=True)


class _Brief(logging.Formatter):
    """A formatter that leaves the traceback of expected errors away: their words say it all."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and exit_code_of(error) is not None:
            record = copy.copy(record)  # other handlers keep it: the traceback is in the UI
            record.exc_info = record.exc_text = None
        return self._formatter.format(record)


def shorten_console() -> None:
    """Log expected errors without tracebacks on the terminal. To be called when Prefect, which sets the console up, is imported."""
    for handler in logging.getLogger().handlers:
        if handler.formatter is not None and not isinstance(handler.formatter, _Brief):
            handler.setFormatter(_Brief(handler.formatter))


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Decorator of a command: expected errors become one message on stderr and an exit code."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            say("rlhf: interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            code = exit_code_of(error)
            if code is None:
                raise
            say(f"rlhf: {error}")
            raise typer.Exit(code) from None

    return run
