"""Whether an object of a branch is garbage. The rule is told in ``tasks.garbage.collect``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from infra.object_store import LocalObjectStore, S3ObjectStore
from rlhf_core import layout
from rlhf_core.buffer import find_stage
from rlhf_core.lineage import Lineage, children
from rlhf_core.manifests import CheckpointRecord
from rlhf_core.records import find_record
from tasks.progress import committed_versions
from tasks.retention import ROLLOUT_STAGES, first_unshared

Store = LocalObjectStore | S3ObjectStore

#: Small objects read at once.
_READERS = 16


@dataclass(frozen=True)
class Verdict:
    """Why an object may go, and under which conditions."""

    kind: Literal["local file", "branch", "shard", "checkpoint file", "upload"]
    reason: str
    exclusive: bool
    """Only while nobody drives the run."""
    patient: bool
    """Only if it is older than the grace period."""
    stays: bool = False
    """It is not needed by anything that is committed, but it has to stay for the reason given."""


def data_place(branch: str, key: str) -> tuple[int, str] | None:
    """Iteration and stage of a shard of the branch; None for any other key."""
    parts = key.split("/")  # runs/BRANCH/iterations/ITERATION/data/STAGE/ATTEMPT/FILE
    if len(parts) != 8 or not parts[3].isdecimal() or parts[5] not in ROLLOUT_STAGES:
        return None
    place = int(parts[3]), parts[5]
    return place if key.startswith(f"{layout.stage_data(branch, *place)}/") else None


def checkpoint_place(branch: str, key: str) -> int | None:
    """Policy version of a file of one of the branch's checkpoints; None for any other key."""
    parts = key.split("/")  # runs/BRANCH/checkpoints/VERSION/ATTEMPT/PATH
    if len(parts) < 6 or not parts[3].isdecimal():
        return None
    return int(parts[3]) if key.startswith(f"{layout.checkpoint_root(branch, int(parts[3]))}/") else None


class BranchJudge:
    """Judges keys of one branch. Made after they were listed: it reads what is committed for each of them.

    ``branches`` are those of the run, the head last; ``actors_end`` says that the run's actors are ended before anything
    is deleted.
    """

    def __init__(
        self,
        store: Store,
        branch: str,
        lineage: Lineage,
        branches: Sequence[str],
        keys: Sequence[str],
        *,
        actors_end: bool,
    ) -> None:
        self.store, self.branch, self.is_head, self.actors_end = store, branch, branch == lineage.head, actors_end
        self._unshared = first_unshared(store, branch)
        self._newest = max(committed_versions(store, branch), default=0)
        self._relatives = ({record.run for record in lineage.records} | set(branches)) - {branch}
        for known in branches:
            self._relatives |= {record.child for record in children(store, known)} - {branch}
        there = set(keys)
        places = sorted({place for key in keys if (place := data_place(branch, key)) is not None})
        versions = sorted({v for key in keys if (v := checkpoint_place(branch, key)) is not None})
        self._retired = {k for k, _ in places if layout.iteration_retired(branch, k) in there}
        with ThreadPoolExecutor(_READERS) as pool:
            self._shards = dict(zip(places, pool.map(lambda p: self._named(branch, *p), places), strict=True))
            self._files = dict(zip(versions, pool.map(lambda v: self._saved(branch, v), versions), strict=True))
        self._elsewhere: dict[tuple[int, str] | int, frozenset[str]] = {}

    def of(self, key: str) -> Verdict | None:
        """None if the object is needed, or not of a kind that can be garbage."""
        place = data_place(self.branch, key)
        if place is not None:
            return self._shard(key, *place)
        version = checkpoint_place(self.branch, key)
        return None if version is None else self._checkpoint_file(key, version)

    def of_upload(self, key: str) -> Verdict:
        """The same for an upload that nobody finished. An upload itself is never needed: its writer begins again."""
        place, version = data_place(self.branch, key), checkpoint_place(self.branch, key)
        decided = (place is not None and self._shards[place] is not None) or (
            version is not None and (self._files[version] is not None or version < self._newest)
        )
        reason = "an upload that was not finished"
        return Verdict("upload", f"{reason}, of what is decided" if decided else reason, not decided, patient=True)

    def _shard(self, key: str, iteration: int, stage: str) -> Verdict | None:
        named = self._shards[iteration, stage]
        if named is not None and key in named:
            if iteration in self._retired and iteration >= self._unshared:
                reason = "left over when its iteration was retired"
                return Verdict("shard", reason, exclusive=False, patient=False)
            return None
        if self._named_elsewhere(key, (iteration, stage)):
            return None
        if named is not None:
            return Verdict("shard", "another attempt at the stage is committed", exclusive=False, patient=False)
        if self.is_head and stage == "generate":
            reason = "a segment of the open generate stage, which the next attempt takes over"
            return Verdict("shard", reason, exclusive=True, patient=True, stays=True)
        return Verdict("shard", "an attempt at a stage that nobody committed", exclusive=True, patient=True)

    def _checkpoint_file(self, key: str, version: int) -> Verdict | None:
        named = self._files[version]
        if (named is not None and key in named) or self._named_elsewhere(key, version):
            return None
        if named is not None:
            reason = "another attempt at the checkpoint is committed"
            return Verdict("checkpoint file", reason, exclusive=False, patient=False)
        reason = "a checkpoint that nobody committed"
        if version < self._newest:
            return Verdict("checkpoint file", f"{reason}, before a newer one", exclusive=False, patient=True)
        if not self.actors_end:
            reason = f"{reason}, but trainers may live that still will: look where the Ray cluster is up"
        return Verdict("checkpoint file", reason, exclusive=True, patient=True, stays=not self.actors_end)

    def _named_elsewhere(self, key: str, place: tuple[int, str] | int) -> bool:
        if place not in self._elsewhere:
            found: set[str] = set()
            for relative in self._relatives:
                named = self._saved(relative, place) if isinstance(place, int) else self._named(relative, *place)
                found |= named or frozenset()
            self._elsewhere[place] = frozenset(found)
        return key in self._elsewhere[place]

    def _named(self, branch: str, iteration: int, stage: str) -> frozenset[str] | None:
        """Keys that the stage's manifest names; None if nobody committed it."""
        manifest = find_stage(self.store, branch, iteration, stage)
        return None if manifest is None else frozenset(shard.key for shard in manifest.shards)

    def _saved(self, branch: str, version: int) -> frozenset[str] | None:
        """Keys that the checkpoint's record names; None if nobody committed it."""
        record = find_record(self.store, layout.checkpoint_commit(branch, version), CheckpointRecord)
        return None if record is None else frozenset(file.key for file in record.files)
