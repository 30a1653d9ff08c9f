"""Being the one driver of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from infra.object_store import bare_store
from infra.ray_cluster import reconnect
from rlhf_core.config import RunConfig
from rlhf_core.errors import CapacityError, StaleEngine, UserError, WorkerError, WorkerFault
from rlhf_core.lease import Holder, Lease
from rlhf_core.lineage import Lineage, load_lineage
from rlhf_core.manifests import ClusterRef, RunSummary
from tasks.checkpoint import publish_checkpoint
from tasks.cluster import start_cluster, stop_actors
from tasks.context import StageContext, open_run_store
from tasks.export import find_export
from tasks.names import namespace_of
from tasks.parity import parity
from tasks.preflight import check_before_start
from tasks.progress import load_progress
from tasks.reporting import report_summary, show_progress, start_progress
from tasks.reports import report
from tasks.restarts import check_restarts
from tasks.retention import retire
from tasks.summary import summarize
from tasks.unfailing import only_warns
from tasks.zombies import end_zombies


@task(name="preflight", task_run_name="preflight", persist_result=False, cache_policy=NO_CACHE)
def preflight(config: RunConfig) -> None:
    """Refuse what cannot work, before a model loads."""
    for warning in check_before_start(config):
        get_run_logger().warning("%s", warning)


#: Errors after which rebuilding dead or dirty workers helps.
_CURABLE = (WorkerError, StaleEngine, ConnectionError)

#: Pause between two attempts at rebuilding.
_REST_SECONDS = 10.0


@dataclass
class Driver:
    """The holder of a run's lease."""

    config: RunConfig
    lease: Lease
    lineage: Lineage
    started: float = field(default_factory=time.monotonic)
    _bar: UUID | None = None
    _device: str | None = None

    def is_finished(self) -> bool:
        """Whether nothing is left to do: the export, which comes last, is there."""
        return find_export(self.config, self.lineage.head, self.config.iterations) is not None

    def start_cluster(self) -> ClusterRef:
        """Actors at the run's policy version. A worker that dies meanwhile is made once more."""
        cluster = self._build(self.config.limits.recoveries + 1)
        self._device = cluster.device
        return cluster

    def persevere(self, cluster: ClusterRef, work: Callable[[ClusterRef], object]) -> ClusterRef:
        """Do the work. When a worker dies, rebuild what is gone and do it again, as often in a row as `limits.recoveries` says.

        The work looks up what is committed, so nothing is done twice. Returns the actors, which may be other ones now.
        A WorkerFault that comes back with the same words ends the run at once.
        """
        before = ""
        for left in range(self.config.limits.recoveries, -1, -1):
            try:
                work(cluster)
                return cluster
            except _CURABLE as error:
                self.lease.check()
                if not left or (isinstance(error, WorkerFault) and str(error) == before):
                    raise
                before = str(error)
                get_run_logger().warning("%s: rebuilding what is gone; %d more times", error, left - 1)
                cluster = self._rebuild(left)
        raise AssertionError("the last round returns or raises")

    def _rebuild(self, rounds: int) -> ClusterRef:
        """As ``_build``, but a cluster that has become too small is waited for: a dead node may need a while to come back."""
        deadline = time.monotonic() + self.config.limits.startup_seconds
        while True:
            try:
                return self._build(rounds, faults=2)  # others may have been taking or giving back memory
            except CapacityError as error:
                self.lease.check()
                if time.monotonic() > deadline:
                    raise
                get_run_logger().warning("waiting for the cluster: %s", error)
                time.sleep(_REST_SECONDS)

    def _build(self, rounds: int, faults: int = 1) -> ClusterRef:
        """Actors at the run's policy version, tried anew while workers die; at the WorkerFault number ``faults`` no longer."""
        for left in range(rounds, 0, -1):
            try:
                reconnect(namespace_of(self.config.storage.url))
                return start_cluster(self.config, self.lineage.head, self.lease.epoch, self._device)
            except _CURABLE as error:
                faults -= isinstance(error, WorkerFault)
                if left == 1 or not faults:
                    raise
                get_run_logger().warning("building failed: %s; again in %.0f s", error, _REST_SECONDS)
                time.sleep(_REST_SECONDS)
        raise AssertionError("the last round returns or raises")

    def at_start(self) -> bool:
        """Whether no update was ever committed: only then the engines serve the starting policy."""
        return load_progress(self.lease.store, self.lineage).policy_version == 0

    def check_parity(self, cluster: ClusterRef) -> None:
        """Trainer and engines compute the plain model's function, or the run ends here, with its actors."""
        try:
            parity(self.config, cluster)
        except UserError:
            stop_actors(self.config)
            raise

    def evaluates_after(self, iteration: int) -> bool:
        """Whether the policy after this iteration is evaluated: the last one always is."""
        every, done = self.config.evaluation.every, iteration + 1
        return done == self.config.iterations or (every > 0 and done % every == 0)

    def pending(self) -> Iterator[int]:
        """The iterations that this flow run is to do. Finished ones are not touched: they create no runs.

        A subflow does all that are left. It could not be ended and another one be started: its parent waits for it.
        """
        first, last = load_progress(self.lease.store, self.lineage).next_iteration, self.config.iterations
        if flow_run.get_parent_flow_run_id() is None:
            last = min(last, first + self.config.limits.iterations_per_flow_run)
        with only_warns("no progress bar"):
            self._bar = start_progress(self.config, first)
        for iteration in range(first, last):
            self.lease.check()
            yield iteration
            if self._bar is not None:
                with only_warns("the progress bar stays where it is"):
                    show_progress(self._bar, self.config, iteration + 1)

    def has_more(self) -> bool:
        """Whether iterations are left for another flow run."""
        return load_progress(self.lease.store, self.lineage).next_iteration < self.config.iterations

    def publish(self, cluster: ClusterRef, wait: bool = False) -> None:
        """Commit a checkpoint that has been uploaded meanwhile, and delete what it makes superfluous.

        A rank that is gone is not rebuilt for this: the next iteration needs it and will notice.
        """
        context = StageContext(self.config, cluster, 0, attempt="publish")
        try:
            published = publish_checkpoint(context, wait)
        except _CURABLE as error:
            get_run_logger().warning("no checkpoint is published now: %s", error)
            return
        if published is not None:
            retire(context.store, self.lineage, self.config)

    def hand_over(self) -> RunSummary:
        """Summary so far. The actors stay for the flow run that goes on."""
        return summarize(self.config, time.monotonic() - self.started).model_copy(update={"finished": False})

    def finish(self) -> RunSummary:
        """Summary of the run; its actors end."""
        stop_actors(self.config)
        with only_warns("what killed drivers left may show as running"):
            end_zombies(self.config)  # what a killed process sent last may have arrived after the first look
        summary = summarize(self.config, time.monotonic() - self.started)
        with only_warns("no summary in Prefect"):
            report_summary(summary)
        return summary


@contextmanager
def drive(config: RunConfig) -> Iterator[Driver]:
    """Check the run, take its lease, and give it back at the end. RunLocked if another living driver holds it."""
    check_restarts(config)
    preflight(config)
    store = open_run_store(config)
    with Lease.acquire(store, config.run_id, Holder.current(), beats=bare_store(store)) as lease:
        with only_warns("what killed drivers left may show as running"):
            end_zombies(config)
        lineage = load_lineage(store, config.run_id)
        report(config, store, lineage, load_progress(store, lineage).next_iteration)
        yield Driver(config, lease, lineage)
