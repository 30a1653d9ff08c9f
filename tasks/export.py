"""Export of the final policy as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.object_store import LocalObjectStore, bare_store
from infra.settings import load_settings
from rlhf_core import layout
from rlhf_core.bases import weights_of
from rlhf_core.config import RunConfig
from rlhf_core.files import upload_files
from rlhf_core.manifests import ClusterRef, ExportRecord
from rlhf_core.records import commit_record, find_record
from tasks.context import StageContext, open_run_store
from tasks.handover import to_trainers
from tasks.preflight import model_folder


@task(name="export", task_run_name="export-v{version}", persist_result=False, cache_policy=NO_CACHE)
def export_policy(config: RunConfig, cluster: ClusterRef, version: int) -> ExportRecord:
    """Write the policy to ``storage.export`` (default ``RLHF_HOME/exports/RUN``), and to the store if that is remote."""
    found = find_export(config, cluster.branch, version)
    if found is not None:
        return found
    context = StageContext(config, cluster, version - 1, attempt="export")
    folder = Path(config.storage.export or load_settings().home / "exports" / context.run).resolve()
    model = str(model_folder(config))
    to_trainers(context)
    context.trainers.call("export", version, model, str(folder), seconds=context.deadline)
    files = []
    if not isinstance(bare_store(context.store), LocalObjectStore):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = upload_files(context.store, folder, paths, layout.export(context.run, f"v{version:010d}"))
    record = ExportRecord(
        run=context.run,
        policy_version=version,
        weights_digest=str(weights_of(context.store, context.lineage, version)),
        folder=str(folder),
        files=tuple(files),
    )
    return commit_record(context.store, layout.export(context.run, f"{layout.version_name(version)}.json"), record)[0]


def find_export(config: RunConfig, branch: str, version: int) -> ExportRecord | None:
    """The export of this policy version, if its files are still where the record says."""
    key = layout.export(branch, f"{layout.version_name(version)}.json")
    found = find_record(open_run_store(config), key, ExportRecord)
    if found is None or found.files or (Path(found.folder) / "config.json").exists():
        return found
    return None
