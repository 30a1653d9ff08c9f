"""What killed processes left behind, and nothing else: found by ``find_garbage``, deleted by ``collect``.

The rule. An object is garbage only if no manifest or record of any branch of the run, or of its forks, names it, and

* it is a shard of another attempt at a stage that is committed: nobody can commit it any more;
* it is a shard of a stage that nobody committed, and nobody drives the run. The head's ``generate`` is left alone: its
  segments are work that the next attempt takes over;
* it is a file of a checkpoint of which another attempt is committed; or of one without a record, when a newer checkpoint is
  committed, or nobody drives the run and the actors that might still publish it are ended too;
* it belongs to a rerun that was cut off before it became the run's head, and nobody drives the run.

Shards that a manifest names are garbage only if their iteration was retired (RETIRED.json) and nobody shares it. Unfinished
multipart uploads are judged as the object that they would become. Local files, actors and the reservation of devices are
garbage when nobody drives the run, except finished segments that still wait for the store.

What nobody committed, local files and uploads must also be older than the grace period. Listings only propose: what is
committed is read, and damage ends the search with an error. Keys that are not understood are left alone. While ``collect``
deletes what needs that nobody drives the run, it holds the run's lease itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

from infra.object_store.listing import StoredObject, list_objects
from infra.object_store.multipart import Upload, abort_uploads, list_uploads
from infra.ray_cluster import connect
from infra.settings import load_settings
from rlhf_core import layout
from rlhf_core.actors.group import kill
from rlhf_core.actors.leftovers import is_reserved, named_actors
from rlhf_core.errors import RunLocked
from rlhf_core.lease import Holder, Lease, lease_state, require_free
from rlhf_core.lineage import Lineage, current_revision, load_lineage
from tasks.cluster import reservation_name, stop_actors
from tasks.garbage.local_files import delete_files, find_files
from tasks.garbage.verdicts import BranchJudge, Store, Verdict
from tasks.names import namespace_of
from tasks.runs import load_config_of

Kind = Literal["actor", "reservation", "local file", "branch", "shard", "checkpoint file", "upload"]

#: In this order things are deleted: actors first, because they may still use the rest.
_ORDER = ("actor", "reservation", "local file", "branch", "shard", "checkpoint file", "upload")
_KEYS_AT_ONCE = 1000


@dataclass(frozen=True)
class Item:
    """One thing to delete. ``name`` is an object key, a local path, or a name in Ray."""

    kind: Kind
    name: str
    bytes: int
    reason: str
    exclusive: bool
    """Only to be deleted while nobody drives the run."""
    upload: Upload | None = None


@dataclass(frozen=True)
class Garbage:
    """What was found for a run. ``spared`` counts what looks like garbage but has to stay for now, by reason."""

    run: str
    epoch: int
    """Epoch of the run's lease when it was looked at; 0 if nobody ever drove the run."""
    driver: str | None
    """Who drives the run, where a living driver does. Then nothing exclusive is listed."""
    items: tuple[Item, ...] = ()
    spared: dict[str, int] = field(default_factory=dict)


def find_garbage(
    store: Store, run: str, grace_seconds: float, *, home: Path | None = None, ray: bool = False
) -> Garbage:
    """Look, and change nothing.

    ``home`` is RLHF_HOME, where the run's local files are staged; None leaves them out. ``ray`` also looks for actors, see
    ``ray_answers``. UserError for a bad run name, NotCommitted if there is no such run, IntegrityError if a record of the
    run is damaged or newer than this version, OSError if the store fails.
    """
    state = lease_state(store, layout.check_run(run))
    lineage = load_lineage(store, run)
    newest = int(lineage.head.partition("~")[2] or 0)
    branches = [layout.branch(run, revision) for revision in range(newest + 1)]
    # The epoch comes first, so that ``collect`` notices every driver since. Then the listings, then who drives, then what is
    # committed: nothing that is listed is a later driver's, and what a driver committed before it ended is seen.
    objects = {branch: list_objects(store, layout.run_root(branch)) for branch in branches}
    uploads = {branch: list_uploads(store, layout.run_root(branch)) for branch in branches}
    unborn = _unborn_branch(store, lineage, layout.branch(run, newest + 1))
    found = _Found(_driver(store, run), grace_seconds)
    if current_revision(store, run) != newest:
        raise RunLocked(f"run {run!r} got a new head while its garbage was looked for: look again")
    for branch in branches:
        keys = [*(o.key for o in objects[branch]), *(u.key for u in uploads[branch])]
        judge = BranchJudge(store, branch, lineage, branches, keys, actors_end=ray)
        for entry in objects[branch]:
            found.add_object(entry, judge.of(entry.key))
        for upload in uploads[branch]:
            found.add_upload(upload, judge.of_upload(upload.key))
    for entry in unborn:
        reason = "a rerun that was cut off before it began"
        found.add_object(entry, Verdict("branch", reason, exclusive=True, patient=True))
    if home is not None and found.driver is None:
        for file, verdict in find_files(store, home, lineage, branches):
            found.add_object(file, verdict)
    if ray and found.driver is None:
        found.items += _held_by_ray(store, run)
    epoch = state.claim.epoch if state is not None else 0
    return Garbage(run, epoch, found.driver, tuple(found.items), dict(found.spared))


def collect(store: Store, garbage: Garbage) -> None:
    """Delete what was found; what is gone already is skipped.

    First what is safe whoever drives the run, then the rest under the run's lease: RunLocked if another driver holds it, or
    has held it since ``find_garbage``. OSError if the store fails; what is left is found again.
    """
    _delete(store, garbage.run, [item for item in garbage.items if not item.exclusive], lambda: None)
    exclusive = [item for item in garbage.items if item.exclusive]
    if not exclusive:
        return
    with Lease.acquire(store, garbage.run, Holder.current()) as lease:
        if lease.epoch != garbage.epoch + 1:
            raise RunLocked(f"run {garbage.run!r} was driven since its garbage was looked for: look again")
        _delete(store, garbage.run, exclusive, lease.check)


def ray_answers(store_url: str) -> bool:
    """Connect to the Ray cluster that RAY_ADDRESS names; whether there is one that answers."""
    if load_settings().ray_address is None:
        return False  # Ray would start a cluster of its own
    try:
        connect(namespace_of(store_url))
    except ConnectionError:
        return False
    return True


class _Found:
    """Collects items, and counts what is spared."""

    def __init__(self, driver: str | None, grace_seconds: float) -> None:
        self.driver, self.grace, self.now = driver, grace_seconds, time.time()
        self.items: list[Item] = []
        self.spared: Counter[str] = Counter()

    def add_object(self, entry: StoredObject, verdict: Verdict | None) -> None:
        if verdict is not None and self._goes(verdict, entry.modified):
            self.items.append(Item(verdict.kind, entry.key, entry.bytes, verdict.reason, verdict.exclusive))

    def add_upload(self, upload: Upload, verdict: Verdict) -> None:
        if self._goes(verdict, upload.started):
            self.items.append(Item("upload", upload.key, upload.bytes, verdict.reason, verdict.exclusive, upload))

    def _goes(self, verdict: Verdict, since: float) -> bool:
        why = None
        if verdict.stays:
            why = verdict.reason
        elif verdict.exclusive and self.driver is not None:
            why = f"{verdict.reason}, but a driver lives"
        elif verdict.patient and self.grace > 0 and self.now - since < self.grace:
            why = f"{verdict.reason}, but less than {self.grace / 3600:g} h ago"
        if why is not None:
            self.spared[why] += 1
        return why is None


def _driver(store: Store, run: str) -> str | None:
    try:
        require_free(store, run, Holder.current())
    except RunLocked as error:
        return str(error)
    return None


def _unborn_branch(store: Store, lineage: Lineage, branch: str) -> list[StoredObject]:
    """The record of a rerun that never became the head, and the parents' records of it, in the order to delete them."""
    below = list_objects(store, layout.run_root(branch))
    if any(entry.key != layout.run_record(branch) for entry in below):
        return []  # whatever this is, somebody has worked in it
    parents = [(r.run, layout.child(r.run, branch)) for r in lineage.records]
    return below + [e for run, key in parents for e in list_objects(store, layout.children(run)) if e.key == key]


def _held_by_ray(store: Store, run: str) -> Iterator[Item]:
    reason = "nobody drives the run"
    for name in named_actors(run, namespace_of(store.url)):
        yield Item("actor", name, 0, reason, exclusive=True)
    reservation = reservation_name(load_config_of(store.url, run))
    if is_reserved(reservation):
        yield Item("reservation", reservation, 0, reason, exclusive=True)


def _delete(store: Store, run: str, items: Sequence[Item], check: Callable[[], None]) -> None:
    """Delete in an order in which a kill at any moment leaves only garbage. ``check`` raises when we must stop."""
    ordered = sorted(items, key=lambda item: _ORDER.index(item.kind))
    for kind, group in groupby(ordered, key=lambda item: item.kind):
        members = list(group)
        check()
        if kind == "actor":
            kill([item.name for item in members], namespace_of(store.url))
        elif kind == "local file":
            delete_files(item.name for item in members)
        elif kind == "branch":
            for item in members:  # the branch's record before the parents' records of it
                store.delete([item.name])
        elif kind == "upload":
            abort_uploads(store, [item.upload for item in members if item.upload is not None])
        elif kind != "reservation":
            for start in range(0, len(members), _KEYS_AT_ONCE):
                check()
                store.delete([item.name for item in members[start : start + _KEYS_AT_ONCE]])
    if any(item.kind in ("actor", "reservation") for item in items):
        stop_actors(load_config_of(store.url, run))
