"""Stage ``commit``: the iteration is finished. Its record is the only truth that resume looks at."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from rlhf_core import layout
from rlhf_core.bases import weights_of
from rlhf_core.config import RunConfig
from rlhf_core.manifests import STAGES, ClusterRef, IterationRecord, StageManifest
from rlhf_core.records import commit_record, find_record
from tasks.context import StageContext
from tasks.reporting import report_iteration
from tasks.tracking import track


@task(name="commit", task_run_name="it{iteration:06d}-commit", persist_result=False, cache_policy=NO_CACHE, retries=2)
def commit(config: RunConfig, cluster: ClusterRef, iteration: int) -> object:
    """Write ``DONE.json`` by put-if-absent, then tell Prefect and the trackers."""
    context = StageContext(config, cluster, iteration, attempt="commit")
    key = layout.iteration_done(context.run, iteration)
    found = find_record(context.store, key, IterationRecord)
    if found is not None:
        return Completed(name="Reused", message="the iteration is committed", data=found)
    stages = {name: context.stage(name) for name in STAGES if name != "commit"}
    context.require_lease()
    record, mine = commit_record(context.store, key, _record(context, stages))
    if mine:
        track(config, record)
        report_iteration(context, record, stages)
    return record


def _record(context: StageContext, stages: dict[str, StageManifest]) -> IterationRecord:
    metrics = {name: value for manifest in stages.values() for name, value in manifest.metrics.items()}
    metrics |= {f"seconds/{name}": manifest.seconds for name, manifest in stages.items()}
    metrics["store/bytes"] = float(sum(s.bytes for m in stages.values() for s in m.shards))
    metrics |= _memory(context)
    return IterationRecord(
        run=context.run,
        iteration=context.iteration,
        policy_version=context.iteration + 1,
        weights_digest=str(weights_of(context.store, context.lineage, context.iteration + 1)),
        stages={name: manifest.digest for name, manifest in stages.items()},
        metrics=metrics,
        stage_seconds={name: manifest.seconds for name, manifest in stages.items()},
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _memory(context: StageContext) -> dict[str, float]:
    """Peak resident memory of each kind of worker, the largest of its kind, in GiB."""
    groups = {"trainer": context.trainers, "engine": context.engines, "reward": context.rewards}
    found = {}
    for kind, group in groups.items():
        peaks = [s["peak_rss_gib"] for s in group.call_status(context.deadline)]
        found[f"memory/{kind}_peak_gib"] = max(peaks)
    return found
