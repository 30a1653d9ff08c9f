"""What the terminal says about errors inside a flow."""

from __future__ import annotations

import io
import logging

import pytest

from flows.cli.errors import shorten_console
from rlhf_core.errors import WorkerFault


@pytest.fixture
def streams():
    """Two handlers of the root logger, of which the first has a formatter, and what they write."""
    root, written = logging.getLogger(), (io.StringIO(), io.StringIO())
    handlers = [logging.StreamHandler(stream) for stream in written]
    handlers[0].setFormatter(logging.Formatter("%(levelname)s | %(message)s"))
    before, root.handlers = root.handlers, handlers
    yield written
    root.handlers = before


@pytest.mark.parametrize(
    ("error", "traced"), [(WorkerFault("start: a failed: ValueError: b"), False), (KeyError("b"), True)]
)
def test_expected_errors_have_no_traceback_on_the_console_only(streams, error, traced):
    console, other = streams
    shorten_console()
    shorten_console()
    try:
        raise error
    except Exception as caught:
        logging.getLogger("a.flow").exception("failed: %r", caught)
    assert console.getvalue().startswith(f"ERROR | failed: {error!r}")
    assert ("Traceback" in console.getvalue()) is traced
    assert "Traceback" in other.getvalue()
