"""What every stage needs, built anew from plain values in whatever process the task runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

from infra.object_store import LocalObjectStore, PatientStore, S3ObjectStore, open_store
from infra.ray_cluster import connect
from rlhf_core import layout
from rlhf_core.actors.group import ActorGroup
from rlhf_core.actors.watch import Patience
from rlhf_core.config import RunConfig
from rlhf_core.errors import FencedOut, StoreError
from rlhf_core.lineage import Lineage, load_lineage
from rlhf_core.manifests import ClusterRef, PromptsManifest, StageManifest

RunStore = LocalObjectStore | S3ObjectStore | PatientStore


def open_run_store(config: RunConfig) -> RunStore:
    """The store of the run, which outlasts outages. StoreError if the URL is none."""
    try:
        return open_store(config.storage.url, config.limits.store_outage_seconds)
    except ValueError as error:
        raise StoreError(f"storage.url = {config.storage.url!r}: {error}") from None


@lru_cache(maxsize=8)
def lineage_of(url: str, branch: str) -> Lineage:
    """Lineage of a branch, read once: the records of a branch never change after its first stage."""
    return load_lineage(open_store(url), branch)


@dataclass(frozen=True)
class StageContext:
    """One attempt at one stage of one iteration."""

    config: RunConfig
    cluster: ClusterRef
    iteration: int
    attempt: str

    @cached_property
    def store(self) -> RunStore:
        return open_run_store(self.config)

    @property
    def run(self) -> str:
        """Branch of the run that new stages are committed to."""
        return self.cluster.branch

    @property
    def lineage(self) -> Lineage:
        """What the branch shares with its parents."""
        return lineage_of(self.config.storage.url, self.run)

    @property
    def deadline(self) -> float:
        """Seconds that a call to actors may take."""
        return self.config.limits.stage_seconds

    @cached_property
    def prompts(self) -> PromptsManifest:
        """The run's prompts."""
        return self.lineage.record.prompts

    @property
    def trainers(self) -> ActorGroup:
        return self._group(self.cluster.trainers)

    @property
    def engines(self) -> ActorGroup:
        return self._group(self.cluster.engines)

    @property
    def rewards(self) -> ActorGroup:
        return self._group(self.cluster.rewards)

    def stage(self, name: str) -> StageManifest:
        """What an earlier stage of this iteration committed. NotCommitted if it has not."""
        return self.lineage.load(self.store, self.iteration, name)

    def require_lease(self) -> None:
        """FencedOut if a newer driver has taken the run over."""
        if self.store.exists(layout.lease(self.run, self.cluster.epoch + 1)):
            raise FencedOut(
                f"run {self.run}: a newer driver took over; this one (lease epoch {self.cluster.epoch}) stops"
            )

    def _group(self, names: tuple[str, ...]) -> ActorGroup:
        connect(self.cluster.namespace)
        return ActorGroup(names, self.cluster.namespace, self.cluster.epoch, patience_of(self.config))


def patience_of(config: RunConfig) -> Patience:
    """How long the run's workers may stand still."""
    limits = config.limits
    return Patience(limits.stall_seconds, limits.startup_seconds, limits.store_outage_seconds)


def split(count: int, parts: int) -> list[range]:
    """Cut 0 .. count - 1 into ``parts`` ranges whose sizes differ by at most one."""
    bounds = [count * i // parts for i in range(parts + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]
