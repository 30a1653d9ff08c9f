"""How a command ends: one message and an exit code for what is expected, a traceback for what is not."""

from __future__ import annotations

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
