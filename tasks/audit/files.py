"""What lies beside the iterations: prompt tables, checkpoints, evaluations and exports."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rlhf_core import layout
from rlhf_core.buffer import decode, read_object
from rlhf_core.errors import CorruptObject
from rlhf_core.files import download_files
from rlhf_core.manifests import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    ParityRecord,
    RunRecord,
    Shard,
    StoredFile,
)
from rlhf_core.records import digest
from tasks.audit.damage import Finding
from tasks.audit.records import Reader, version_of


@dataclass(frozen=True)
class Version:
    """A policy version as its records have it."""

    weights: tuple[str, ...]
    """Digests: the one of its update, then those of replays that the run went on from."""
    update: str
    """Digest of the update's manifest."""


Updates = dict[int, Version]


class Prompts:
    """The prompt ids of the tables of a run, each table verified once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._ids: dict[str, list[str] | None] = {}

    def ids(self, record: RunRecord, name: Literal["train", "heldout", "dropped"]) -> list[str] | None:
        """Prompt ids in the order of the table; None without such a table, or, with a finding, if it is damaged."""
        shard: Shard | None = getattr(record.prompts, name)
        if shard is None:
            return None
        if shard.key not in self._ids:
            self._ids[shard.key] = self._read(shard)
        return self._ids[shard.key]

    def _read(self, shard: Shard) -> list[str] | None:
        ids: list[str] = []

        def read() -> None:
            ids.extend(decode(read_object(self._reader.store, shard))["prompt_id"].to_pylist())
            if len(ids) != shard.rows or digest("\0".join(ids).encode()) != shard.ids_digest:
                raise CorruptObject(f"{shard.key} holds other prompts than its record says")

        remedy = (
            "the same source and seed give the same bytes: start another run with this configuration, and copy the object "
            f"{shard.key.rpartition('/')[2]} from its prompts/ folder"
        )
        if not self._reader.findings.guard(shard.key, read, partial(Finding, shard.key, remedy=remedy)):
            return None
        self._reader.count_object(shard.bytes)
        return ids


def check_checkpoint(reader: Reader, pool: ThreadPoolExecutor, branch: str, version: int, updates: Updates) -> bool:
    """Whether the checkpoint of a policy version is intact, with all its files."""
    key = layout.checkpoint_commit(branch, version)
    make = partial(Finding, checkpoint=version)
    record = reader.read(key, CheckpointRecord, partial(make, key))
    if record is None:
        return False
    problem = _contradiction(record, branch, version, updates)
    if version in updates and record.update not in ("", updates[version].update):
        problem = (
            f"it was made by the update {record.update}, the one of version {version} is {updates[version].update}"
        )
    if problem is not None:
        reader.findings.add(make(key, "inconsistent", problem))
    return all(_check_files(reader, pool, record.files, make)) and problem is None


def check_evaluation(reader: Reader, branch: str, key: str) -> None:
    """Verify the record of an evaluation."""
    remedy = "nothing depends on it, it is only shown: take it from a copy of the store, or delete it"
    record = reader.read(key, EvaluationRecord, partial(Finding, key, remedy=remedy))
    if record is not None and (record.run, record.policy_version) != (branch, version_of(key)):
        problem = f"it is the evaluation of {record.run} version {record.policy_version}"
        reader.findings.add(Finding(key, "inconsistent", problem, remedy=remedy))


def check_parity(reader: Reader, branch: str) -> None:
    """Verify the record of the comparison with the plain model; runs that began before there was one have none."""
    key = layout.parity(branch)
    remedy = (
        "take it from a copy of the store: it says in which layout the run trains; before the first update, delete it"
    )
    record = reader.read(key, ParityRecord, partial(Finding, key, remedy=remedy), problem="")
    if record is not None and record.run != branch:
        reader.findings.add(Finding(key, "inconsistent", f"it is the record of {record.run}", remedy=remedy))


def check_export(reader: Reader, pool: ThreadPoolExecutor, branch: str, key: str, updates: Updates) -> None:
    """Verify the record of an export, and its files as far as they are in the store."""
    version = version_of(key) or 0
    make = partial(Finding, export=version)
    record = reader.read(key, ExportRecord, partial(make, key))
    if record is None:
        return
    problem = _contradiction(record, branch, version, updates)
    if problem is not None:
        reader.findings.add(make(key, "inconsistent", problem))
    _check_files(reader, pool, record.files, make)


def _contradiction(record: CheckpointRecord | ExportRecord, branch: str, version: int, updates: Updates) -> str | None:
    if (record.run, record.policy_version) != (branch, version):
        return f"it is the record of {record.run} version {record.policy_version}"
    if version in updates and record.weights_digest not in updates[version].weights:
        expected = " or ".join(updates[version].weights)
        return f"its weights are {record.weights_digest}, the records of version {version} say {expected}"
    return None


def _check_files(
    reader: Reader, pool: ThreadPoolExecutor, files: tuple[StoredFile, ...], make: partial[Finding]
) -> list[bool]:
    def check(file: StoredFile) -> bool:
        def read() -> None:
            # Through the disk and one after another: a rank's file may be larger than the memory.
            with tempfile.TemporaryDirectory(prefix="rlhf-audit-") as folder:
                download_files(reader.store, [file.model_copy(update={"path": "file"})], Path(folder))

        intact = reader.findings.guard(file.key, read, partial(make, file.key))
        if intact:
            reader.count_object(file.bytes)
        return intact

    return list(pool.map(check, files))
