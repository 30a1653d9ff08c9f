"""Where a run stands, from the store alone."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core import layout
from rlhf_core.buffer import find_stage
from rlhf_core.manifests import Progress, RunRecord, TargetRecord
from rlhf_core.ports import ObjectStore
from rlhf_core.records import find_record


def load_progress(store: ObjectStore, run: str) -> Progress:
    """Count the finished iterations with a logarithmic number of look-ups: they have no gaps."""
    done = _first_missing(lambda k: store.exists(layout.iteration_done(run, k)))
    updated = find_stage(store, run, done, "update") is not None
    return Progress(run=run, next_iteration=done, policy_version=done + 1 if updated else done)


def planned_iterations(store: ObjectStore, record: RunRecord) -> int:
    """Iterations that the run is to have: the last number asked for, and never fewer than are finished."""
    target = find_record(store, layout.run_target(record.run), TargetRecord)
    wanted = target.iterations if target is not None else int(record.config["iterations"])
    return max(wanted, load_progress(store, record.run).next_iteration)


def _first_missing(exists: Callable[[int], bool]) -> int:
    if not exists(0):
        return 0
    low, high = 0, 1
    while exists(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return high
