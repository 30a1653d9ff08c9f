"""Being the one driver of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_core.config import RunConfig
from rlhf_core.lease import Holder, Lease
from rlhf_core.lineage import Lineage, load_lineage
from rlhf_core.manifests import ClusterRef, RunSummary
from tasks.cluster import start_cluster, stop_actors
from tasks.context import open_run_store
from tasks.export import find_export
from tasks.preflight import check_before_start
from tasks.progress import load_progress
from tasks.reporting import report_summary, show_progress, start_progress
from tasks.summary import summarize


@task(name="preflight", task_run_name="preflight", persist_result=False, cache_policy=NO_CACHE)
def preflight(config: RunConfig) -> None:
    """Refuse what cannot work, before a model loads."""
    check_before_start(config)


@dataclass
class Driver:
    """The holder of a run's lease."""

    config: RunConfig
    lease: Lease
    lineage: Lineage
    started: float = field(default_factory=time.monotonic)
    _bar: UUID | None = None

    def is_finished(self) -> bool:
        """Whether nothing is left to do: the export, which comes last, is there."""
        return find_export(self.config, self.lineage.head, self.config.iterations) is not None

    def start_cluster(self) -> ClusterRef:
        """Actors at the run's policy version."""
        return start_cluster(self.config, self.lineage.head, self.lease.epoch)

    def at_start(self) -> bool:
        """Whether no update was ever committed: only then the engines serve the starting policy."""
        return load_progress(self.lease.store, self.lineage).policy_version == 0

    def evaluates_after(self, iteration: int) -> bool:
        """Whether the policy after this iteration is evaluated: the last one always is."""
        every, done = self.config.evaluation.every, iteration + 1
        return done == self.config.iterations or (every > 0 and done % every == 0)

    def pending(self) -> Iterator[int]:
        """The iterations still to do. Finished ones are not touched: they create no runs."""
        first = load_progress(self.lease.store, self.lineage).next_iteration
        self._bar = start_progress(self.config, first)
        for iteration in range(first, self.config.iterations):
            self.lease.check()
            yield iteration
            show_progress(self._bar, self.config, iteration + 1)

    def finish(self) -> RunSummary:
        """Summary of the run; its actors end."""
        stop_actors(self.config)
        summary = summarize(self.config, time.monotonic() - self.started)
        report_summary(summary)
        return summary


@contextmanager
def drive(config: RunConfig) -> Iterator[Driver]:
    """Check the run, take its lease, and give it back at the end. RunLocked if another living driver holds it."""
    preflight(config)
    store = open_run_store(config)
    with Lease.acquire(store, config.run_id, Holder.current()) as lease:
        yield Driver(config, lease, load_lineage(store, config.run_id))
