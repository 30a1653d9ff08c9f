"""Checkpoints: the ranks save to a local folder, the files go to the store, one record commits them."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import blake3
from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.errors import CorruptObject
from rlhf_core.lineage import Lineage
from rlhf_core.manifests import CheckpointRecord, ClusterRef, StoredFile
from rlhf_core.ports import ObjectStore
from rlhf_core.records import commit_record, find_record
from tasks.context import StageContext

_TRANSFERS = 2


def due(config: RunConfig, iteration: int) -> bool:
    """Whether a checkpoint follows this iteration. The last one needs none: its policy is exported."""
    every, done = config.checkpoint.every, iteration + 1
    return bool(every) and done % every == 0 and done < config.iterations


@task(name="checkpoint", task_run_name="it{iteration:06d}-checkpoint", persist_result=False, cache_policy=NO_CACHE)
def save_checkpoint(config: RunConfig, cluster: ClusterRef, iteration: int) -> CheckpointRecord:
    """Checkpoint policy version iteration + 1; older ones beyond ``checkpoint.keep`` are deleted after the commit."""
    context = StageContext(config, cluster, iteration, attempt=uuid.uuid4().hex[:16])
    version, store = iteration + 1, context.store
    key = layout.checkpoint_commit(context.run, version)
    found = find_record(store, key, CheckpointRecord)
    if found is not None:
        return found
    context.require_lease()
    digest = context.stage("update").details["weights_digest"]
    folder = Path(tempfile.mkdtemp(prefix="rlhf-checkpoint-"))
    try:
        context.trainers.call("save_checkpoint", version, str(folder), seconds=context.deadline)
        prefix = f"{layout.checkpoint_root(context.run, version)}/{context.attempt}"
        files = upload_folder(store, folder, prefix)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = CheckpointRecord(
        run=context.run,
        policy_version=version,
        world_size=len(cluster.trainers),
        weights_digest=digest,
        files=tuple(files),
    )
    committed, _ = commit_record(store, key, record)
    _retire(store, context.run, config.checkpoint.keep)
    return committed


def newest_checkpoint(store: ObjectStore, lineage: Lineage, version: int) -> CheckpointRecord | None:
    """The newest committed checkpoint at or before ``version``, of the head or of a version that it shares."""
    for branch in (record.run for record in lineage.records):
        for found in reversed(_versions(store, branch)):
            if found <= version and lineage.branch_of_version(found) == branch:
                record = find_record(store, layout.checkpoint_commit(branch, found), CheckpointRecord)
                if record is not None:
                    return record
    return None


def upload_folder(store: ObjectStore, folder: Path, prefix: str) -> list[StoredFile]:
    """Upload every file below ``folder``; bounded memory."""

    def upload(path: Path) -> StoredFile:
        relative = path.relative_to(folder).as_posix()
        key = f"{prefix}/{relative}"
        store.put_file(key, str(path))
        return StoredFile(path=relative, key=key, bytes=path.stat().st_size, blake3=_digest(path))

    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        return list(pool.map(upload, paths))


def download_files(store: ObjectStore, files: Iterable[StoredFile], folder: Path) -> None:
    """Download and verify. CorruptObject names the object; nothing outside ``folder`` is ever written."""

    def download(file: StoredFile) -> None:
        target = folder / layout.check_relpath(file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(file.key, str(target))
        if target.stat().st_size != file.bytes or _digest(target) != file.blake3:
            raise CorruptObject(f"{file.key} is not what its record says ({file.bytes} bytes, blake3 {file.blake3})")

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        list(pool.map(download, files))


def _digest(path: Path) -> str:
    hasher = blake3.blake3()
    hasher.update_mmap(str(path))
    return hasher.hexdigest()


def _versions(store: ObjectStore, run: str) -> list[int]:
    keys = store.list(layout.checkpoint_commits(run))
    return sorted(v for v in (layout.checkpoint_version(key) for key in keys) if v is not None)


def _retire(store: ObjectStore, run: str, keep: int) -> None:
    """Delete all but the newest checkpoints: the record first, so that none is ever half there."""
    for version in _versions(store, run)[:-keep]:
        store.delete([layout.checkpoint_commit(run, version)])
        store.delete(store.list(layout.checkpoint_root(run, version)))
