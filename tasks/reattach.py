"""Which actors of an earlier driver, or of the time before a failure, are still what the run needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect.logging import get_run_logger

from rlhf_core import layout
from rlhf_core.actors.group import ActorGroup, kill, statuses
from rlhf_core.bases import newest_base, weights_of
from rlhf_core.config import RunConfig
from rlhf_core.errors import RLHFError
from rlhf_core.manifests import ClusterRef
from tasks.context import StageContext, open_run_store, patience_of
from tasks.preflight import has_begun
from tasks.progress import load_progress
from tasks.sync import push_weights

#: How long living actors have to answer before they are replaced.
_ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Position:
    """What the actors have to hold: policy version ``version`` with weights ``digest`` (None for the model folder's).

    ``pending``: digest of the experience that the next update consumes, where it is committed and no guard is against it;
    ranks that have applied exactly that one are as good: the update stage takes their answer from their record.
    """

    version: int
    digest: str | None
    pending: str | None


@dataclass(frozen=True)
class Kept:
    """The actors that stay. ``engines_current``: those of them that are engines serve the run's version."""

    names: frozenset[str]
    engines_current: bool

    def __contains__(self, name: object) -> bool:
        return name in self.names


def find_position(config: RunConfig, cluster: ClusterRef) -> Position:
    """From the store alone."""
    context = StageContext(config, cluster, 0, attempt="position")
    store, lineage = context.store, context.lineage
    progress = load_progress(store, lineage)
    version, open_iteration = progress.policy_version, progress.next_iteration
    digest = _weights(context, version)
    pending = None
    if version == open_iteration and not store.exists(layout.guard(context.run, open_iteration)):
        experience = lineage.find(store, open_iteration, "advantages")
        pending = experience.digest if experience is not None else None
    return Position(version, digest, pending)


def _weights(context: StageContext, version: int) -> str | None:
    """Digest of this policy version as the run's topology has it; None for the model folder's weights."""
    lineage = context.lineage
    if version and version == lineage.base_version() and not lineage.is_exact(version - 1):
        base = newest_base(context.store, lineage, version)
        return base.weights_digest if base is not None else "not restored yet"
    return weights_of(context.store, lineage, version)


def claim_intact(config: RunConfig, cluster: ClusterRef, where: Position) -> Kept:
    """Claim the actors that live and answer, wait for what they still run, and say which of them the run can go on with.

    Before anything is committed the configuration, the model or a file may have changed since an earlier driver made its
    actors, so none of those is kept.
    """
    answered = statuses((*cluster.trainers, *cluster.engines, *cluster.rewards), cluster.namespace, _ANSWER_SECONDS)
    ours = {name for name, status in answered.items() if status["epoch"] == cluster.epoch}
    living = set(answered) if has_begun(open_run_store(config), config) else ours
    shared = cluster.device == "gpu" and config.resources.colocate
    whole = set(cluster.trainers) <= living
    if not whole or (shared and not set(cluster.engines) <= living):
        # The other ranks may hang in a collective with the dead one; and a new engine on a shared GPU has to come first.
        ended = (*cluster.trainers, *(cluster.engines if shared else ()))
        kill([name for name in ended if name in living], cluster.namespace)
        living -= set(ended)
    found = _settled(
        config, cluster, [n for n in (*cluster.trainers, *cluster.engines, *cluster.rewards) if n in living]
    )
    fits = all(name in found and _trainer_fits(found[name], where) for name in cluster.trainers)
    if not fits or (shared and not set(cluster.engines) <= set(found)):
        dropped = set(cluster.trainers) | (set(cluster.engines) if shared else set())
        found = {name: status for name, status in found.items() if name not in dropped}
    current = all(_holds(found[name], where) for name in cluster.engines if name in found)
    return Kept(frozenset(found), current)


def bring_engines(config: RunConfig, cluster: ClusterRef, where: Position) -> None:
    """Push the run's policy version to all engines, unless the ranks are one update ahead: then the sync stage will."""
    context = StageContext(config, cluster, where.version - 1, attempt="restore")
    held = context.trainers.call_status(context.deadline)
    if {status["version"] for status in held} == {where.version}:
        push_weights(context, where.version, held[0]["digest"])


def _settled(config: RunConfig, cluster: ClusterRef, names: list[str]) -> dict[str, dict[str, Any]]:
    """Statuses of the actors after what they ran for the driver before has ended; those that do not get there are left out."""
    found = {}
    for name in names:
        actor = ActorGroup([name], cluster.namespace, cluster.epoch, patience_of(config))
        try:
            actor.call_claim(_ANSWER_SECONDS)
            actor.call("settle", seconds=config.limits.stage_seconds)
            status = actor.call_status(_ANSWER_SECONDS)[0]
        except RLHFError as error:
            get_run_logger().warning("%s is replaced: %s", name, error)
            continue
        # A process whose CUDA context is broken lives, answers, and fails in every call.
        if doubt := status.get("doubt"):
            get_run_logger().warning("%s is replaced: its %s", name, doubt)
            continue
        found[name] = status
    return found


def _trainer_fits(status: dict[str, Any], where: Position) -> bool:
    if _holds(status, where):
        return True
    return status["version"] == where.version + 1 and where.pending is not None and status["applied"] == where.pending


def _holds(status: dict[str, Any], where: Position) -> bool:
    return status["version"] == where.version and status["digest"] == where.digest
