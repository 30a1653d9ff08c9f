"""Telling Prefect and the trackers about finished iterations, each once, from a cursor.

DONE.json is the truth and waits for nobody. What was not told, because a driver died or a service was away, is told with the
next iteration or by the next driver: each sink has a cursor that counts the iterations it was told.
"""

from __future__ import annotations

from functools import partial

from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.errors import IntegrityError
from rlhf_core.lineage import Lineage
from rlhf_core.manifests import IterationRecord, ReportedRecord
from rlhf_core.ports import ObjectStore
from rlhf_core.records import canonical, find_record, load_record, seal
from tasks.reporting import report_iteration
from tasks.tracking import Sink, trackers
from tasks.unfailing import only_warns

#: Iterations that the Prefect server is told at most when it lags: its artifacts are for watching, and each costs a request.
_ARTIFACTS = 20


def report(config: RunConfig, store: ObjectStore, lineage: Lineage, finished: int) -> None:
    """Tell every sink the iterations below ``finished`` that it does not know yet. Never fails: what it cannot tell, it warns of.

    For the holder of the run's lease. A death between telling and moving the cursor repeats one iteration.
    """
    told = partial(report_iteration, store, lineage)
    prefect = Sink("prefect", told, store, layout.reported(lineage.head, "prefect"), backlog=_ARTIFACTS)
    for sink in (*trackers(config, store, lineage.head), prefect):
        with only_warns(f"{sink.name} was not told everything; it will be with the next iteration"):
            _catch_up(sink, store, lineage, finished)


def _catch_up(sink: Sink, store: ObjectStore, lineage: Lineage, finished: int) -> None:
    first = _told(sink, lineage)
    if sink.backlog is not None:
        first = max(first, finished - sink.backlog)
    for iteration in range(first, finished):
        key = layout.iteration_done(lineage.branch_of(iteration, "commit"), iteration)
        sink.tell(load_record(store, key, IterationRecord))
        record = ReportedRecord(run=lineage.head, sink=sink.name, iterations=iteration + 1)
        sink.cursors.put(sink.cursor, canonical(seal(record).model_dump(mode="json")))


def _told(sink: Sink, lineage: Lineage) -> int:
    """The first iteration that the sink was not told. A damaged cursor is none: telling again does no harm."""
    try:
        found = find_record(sink.cursors, sink.cursor, ReportedRecord)
    except IntegrityError:
        found = None
    return found.iterations if found is not None else lineage.first_own()
