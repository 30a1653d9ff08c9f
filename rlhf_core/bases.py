"""Which weights a policy version has, and whether a replay has to give the same bits.

An update is a function of the weights that it begins with, of committed experience, and of its environment: processor, library
versions, number of ranks and threads. Its manifest names both, so a replay that begins with the same weights in the same
environment, which was tested to repeat itself, must end with the recorded digest. Any other replay may differ in the last
bits. The run then goes on from the weights that it gave, and a base record says so: those count for the version from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rlhf_core import layout
from rlhf_core.lineage import Lineage
from rlhf_core.manifests import BaseRecord, EnvironmentRecord, StageManifest
from rlhf_core.ports import ObjectStore
from rlhf_core.records import canonical, commit_record, digest, find_record, load_record
from rlhf_core.searching import count_without_gaps

#: Hex digits of an environment's id.
_ID = 16

#: Keys in the details of an update's manifest.
FROM_WEIGHTS, ENVIRONMENT = "from_weights", "environment"


def environment_id(facts: dict[str, Any]) -> str:
    """Short digest of what ``describe_environment`` says."""
    return digest(canonical(facts))[:_ID]


def find_environment(store: ObjectStore, lineage: Lineage, name: str) -> EnvironmentRecord | None:
    """The record of an environment, of this branch or of any that it shares stages with."""
    for record in lineage.records:
        found = find_record(store, layout.environment(record.run, name), EnvironmentRecord)
        if found is not None:
            return found
    return None


def weights_of(store: ObjectStore, lineage: Lineage, version: int) -> str | None:
    """Digest of the weights that this policy version has for the run now; None for those of the model folder.

    NotCommitted if the update that makes it is not.
    """
    base = newest_base(store, lineage, version)
    if base is not None:
        return base.weights_digest
    return str(lineage.load(store, version - 1, "update").details["weights_digest"]) if version else None


def newest_base(store: ObjectStore, lineage: Lineage, version: int) -> BaseRecord | None:
    """The base that counts for a policy version; None where the update's own weights do."""
    for branch in _branches(lineage, version):
        count = _count(store, branch, version)
        if count:
            return load_record(store, layout.base(branch, version, count), BaseRecord)
        if version == lineage.base_version():
            first = find_record(store, layout.first_base(branch), BaseRecord)
            if first is not None and first.policy_version == version:
                return first
    return None


def base_keys(store: ObjectStore, lineage: Lineage) -> list[str]:
    """Where the bases of all branches of the run are; for people and the audit, from listings. Not all need to be there."""
    return [
        key
        for record in lineage.records
        for key in (*store.list(layout.bases(record.run)), layout.first_base(record.run))
    ]


def describe_base(base: BaseRecord) -> str:
    """For people."""
    return f"policy version {base.policy_version} of {base.run} was replayed from version {base.start}, not exactly: {base.reason}"


def promised(
    store: ObjectStore, lineage: Lineage, update: StageManifest, weights: str | None, environment: str
) -> bool:
    """Whether replaying ``update`` from ``weights`` in this environment has to give the recorded digest."""
    details = update.details
    if details.get(ENVIRONMENT) != environment or details.get(FROM_WEIGHTS) != weights:
        return False
    record = find_environment(store, lineage, environment)
    return record is not None and record.exact


def start_base(
    store: ObjectStore, lineage: Lineage, version: int, weights: str, *, start: int, environment: str, reason: str
) -> BaseRecord:
    """From now on the head goes on from these weights at ``version``. The caller holds the lease."""
    number = _count(store, lineage.head, version) + 1
    record = BaseRecord(
        run=lineage.head,
        policy_version=version,
        weights_digest=weights,
        number=number,
        replaces=weights_of(store, lineage, version),
        start=start,
        environment=environment,
        reason=reason,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return commit_record(store, layout.base(lineage.head, version, number), record)[0]


def _branches(lineage: Lineage, version: int) -> Iterator[str]:
    """Branches whose bases of this version the run sees: its head's own, and those of the branch that made the version."""
    yield lineage.head
    owner = lineage.branch_of_version(version)
    if owner != lineage.head:
        yield owner


def _count(store: ObjectStore, branch: str, version: int) -> int:
    return count_without_gaps(lambda n: store.exists(layout.base(branch, version, n + 1)))
