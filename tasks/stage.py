"""The pattern of every stage: look the manifest up; if it is there, say ``Reused``; else work, and commit by put-if-absent.

That lookup is the whole resume logic. Prefect's own results and caches are not used: they would be a second truth, and one
that does not know that an actor has died.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from functools import wraps
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from rlhf_core.buffer import commit_stage
from rlhf_core.config import RunConfig
from rlhf_core.errors import FencedOut, IntegrityError, NumericsError, UserError, WorkerDied, WorkerFault
from rlhf_core.guards import NOT_FINITE
from rlhf_core.manifests import ClusterRef, StageManifest
from rlhf_core.metric_names import require_own
from tasks.context import StageContext

StageWork = Callable[[StageContext], StageManifest]
StageCall = Callable[[RunConfig, ClusterRef, int], StageManifest]

#: Trying again cannot help these.
_FINAL = (UserError, IntegrityError, NumericsError, FencedOut, WorkerDied, WorkerFault)

#: Waits between retries, doubled each time.
_RETRY_SECONDS = 2


def worth_retrying(_task: Any, _run: Any, state: Any) -> bool:
    """Whether a failed stage may be tried again."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, _FINAL)


def stage_task(name: str, *, retryable: bool) -> Callable[[StageWork], StageCall]:
    """Turn the work of a stage into a Prefect task. ``retryable`` stages are pure functions of what is committed."""

    def decorate(work: StageWork) -> StageCall:
        @task(
            name=name,
            task_run_name=f"it{{iteration:06d}}-{name}",
            persist_result=False,
            cache_policy=NO_CACHE,
            retry_condition_fn=worth_retrying,
        )
        def run_stage(config: RunConfig, cluster: ClusterRef, iteration: int) -> Any:
            context = StageContext(config, cluster, iteration, attempt=uuid.uuid4().hex[:16])
            found = context.lineage.find(context.store, iteration, name)
            if found is not None:
                return Completed(name="Reused", message=f"committed by attempt {found.attempt}", data=found)
            context.require_lease()
            started = time.monotonic()
            manifest = work(context)
            manifest = manifest.model_copy(update={"seconds": time.monotonic() - started})
            context.require_lease()
            return commit_stage(context.store, manifest)[0]

        run_stage.__doc__ = work.__doc__

        @wraps(work)
        def call(config: RunConfig, cluster: ClusterRef, iteration: int) -> StageManifest:
            retries = config.limits.retries if retryable else 0
            configured = run_stage.with_options(
                retries=retries,
                retry_delay_seconds=[_RETRY_SECONDS * 2**n for n in range(retries)] or 0,
                # A backstop: calls to actors have deadlines of their own, which name the late actor.
                timeout_seconds=config.limits.stage_seconds + 60,
            )
            return configured(config, cluster, iteration, return_state=True).result()

        return call

    return decorate


def manifest_of(context: StageContext, stage: str, *, metrics: dict[str, float], **fields: Any) -> StageManifest:
    """A manifest of this attempt, not yet committed.

    A record holds neither NaN nor infinity. Metrics that are not finite are named in the details instead, where the update's
    guard finds them; the data that they were made of is kept for inspection. ValueError for a metric of another stage.
    """
    require_own(stage, metrics)
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    details = dict(fields.pop("details", {}))
    if broken := sorted(metrics.keys() - finite):
        details[NOT_FINITE] = broken
    return StageManifest(
        run=context.run,
        iteration=context.iteration,
        stage=stage,
        attempt=context.attempt,
        metrics=finite,
        details=details,
        **fields,
    )
