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
from rlhf_core.metric_names import of_iteration
from rlhf_core.metrics import united
from rlhf_core.records import commit_record, find_record
from tasks.context import StageContext
from tasks.reports import report


@task(name="commit", task_run_name="it{iteration:06d}-commit", persist_result=False, cache_policy=NO_CACHE, retries=2)
def commit(config: RunConfig, cluster: ClusterRef, iteration: int) -> object:
    """Write ``DONE.json`` by put-if-absent, from the store alone; then tell Prefect and the trackers."""
    context = StageContext(config, cluster, iteration, attempt="commit")
    key = layout.iteration_done(context.run, iteration)
    found = find_record(context.store, key, IterationRecord)
    record = found
    if record is None:
        stages = {name: context.stage(name) for name in STAGES if name != "commit"}
        context.require_lease()
        record = commit_record(context.store, key, _record(context, stages))[0]
    report(config, context.store, context.lineage, iteration + 1)
    return record if found is None else Completed(name="Reused", message="the iteration is committed", data=found)


def _record(context: StageContext, stages: dict[str, StageManifest]) -> IterationRecord:
    metrics = united(
        of_iteration(stages),
        {f"seconds/{name}": manifest.seconds for name, manifest in stages.items()},
        {"store/bytes": float(sum(s.bytes for m in stages.values() for s in m.shards))},
    )
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
