"""Before the first iteration: trainer and engines compute the plain transformers model's function, or the run does not begin.

Three sides score the same rows, made of the run's prompts: the plain model, loaded by itself; the trainer, in the layouts and
micro-batches of an update; and every engine, as it has loaded the model and again after a push of the same weights. A layout that
does not agree is not used: samples then no longer share their prompt. Everything else that does not agree is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from rlhf_core import layout
from rlhf_core.algorithms.parity import Gap, ParityRows, PlainLogprobs, bound, gap, parity_rows
from rlhf_core.config import RunConfig
from rlhf_core.errors import ModelError, WorkerDied, WorkerError
from rlhf_core.manifests import ClusterRef, ParityRecord
from rlhf_core.models import ModelFacts, check_model_folder
from rlhf_core.prompts.table import PromptTable
from rlhf_core.records import commit_record
from tasks.context import StageContext
from tasks.handover import to_engines, to_trainers
from tasks.layouts import find_parity
from tasks.preflight import context_length, model_folder
from tasks.sync import push_weights

#: Prompts of the run and samples of each that are compared.
_PROMPTS, _SAMPLES = 4, 2

_PADDED, _SHARED, _YARDSTICK = "trainer, padded rows", "trainer, shared prompts", "plain model in its own type"


@task(name="parity", task_run_name="parity", persist_result=False, cache_policy=NO_CACHE)
def parity(config: RunConfig, cluster: ClusterRef) -> ParityRecord:
    """Compare at policy version 0, once in a run. ModelError, with the figures, if something does not agree."""
    context = StageContext(config, cluster, 0, attempt="parity")
    found = find_parity(context)
    if found is not None:
        return found
    started = time.monotonic()
    facts = check_model_folder(model_folder(config))
    rows = _rows(context, facts)
    engines = _engines_as_loaded(context, rows)
    to_trainers(context)
    with _refusing(facts, config, "transformers cannot compute it here"):
        plain: PlainLogprobs | None = context.trainers.call("plain_logprobs", rows, seconds=context.deadline)[0]
    with _refusing(facts, config, "the trainer cannot compute it"):
        padded, shared = (_layout(context, rows, share) for share in (False, True))
    engines |= _engines_after_push(context, rows, facts)
    assert isinstance(padded, list)
    truth = plain.exact if plain is not None else padded
    yardstick = gap(plain.own, plain.exact) if plain is not None else None
    limit = bound(config.model.dtype, yardstick, config.probe_tolerance if plain is None else config.sync.tolerance)
    gaps = {name: _gap(logprobs, truth, rows) for name, logprobs in {_PADDED: padded, **engines}.items()}
    _require(gaps, limit, facts, config)
    if isinstance(shared, str):
        reason = shared
    else:
        gaps[_SHARED] = gap(shared, truth)
        reason = "" if gaps[_SHARED].within(limit) else _figures(_SHARED, gaps[_SHARED], limit)
    if yardstick is not None:
        gaps[_YARDSTICK] = yardstick
    record = ParityRecord(
        run=context.lineage.branch_of_version(0),
        dtype=config.model.dtype,
        share_prompts=not reason,
        reason=reason,
        plain=plain is not None,
        bound=astuple(limit),
        gaps={name: astuple(value) for name, value in gaps.items() if math.isfinite(value.mean)},
        rows=len(rows.groups),
        seconds=time.monotonic() - started,
    )
    _log(record, facts, config)
    context.require_lease()
    return commit_record(context.store, layout.parity(record.run), record)[0]


def _rows(context: StageContext, facts: ModelFacts) -> ParityRows:
    """Spread over the run's prompts, so that the same run gives the same rows."""
    table = PromptTable(context.store, context.prompts.train)
    count = min(_PROMPTS, table.rows)
    prompts = [record["prompt_ids"] for record in table.at([i * table.rows // count for i in range(count)])]
    # One less than the engine's context: it wants room for another token.
    return parity_rows(prompts, _SAMPLES, context_length(context.config, facts) - 1, facts.window)


def _engines_as_loaded(context: StageContext, rows: ParityRows) -> dict[str, list[np.ndarray]]:
    """By engine. Nothing from engines that an earlier attempt put to sleep: they come back with the push."""
    if any(status["version"] != 0 for status in context.engines.call_status(context.deadline)):
        return {}
    to_engines(context)
    return _engine_logprobs(context, rows, "")


def _engines_after_push(context: StageContext, rows: ParityRows, facts: ModelFacts) -> dict[str, list[np.ndarray]]:
    digest = context.trainers.call("weights_digest", 0, seconds=context.deadline)[0]
    with _refusing(
        facts, context.config, "its weights do not get from the trainer into the engine, so no update could"
    ):
        push_weights(context, 0, digest)
    to_engines(context)
    return _engine_logprobs(context, rows, " after a push of the same weights")


@contextmanager
def _refusing(facts: ModelFacts, config: RunConfig, what: str) -> Iterator[None]:
    """What fails in a living worker here is the model's, and would fail again in a new one."""
    try:
        yield
    except WorkerDied:
        raise
    except WorkerError as error:
        raise ModelError(f"{facts.architecture} ({config.model.source}): {what}: {error}") from error


def _engine_logprobs(context: StageContext, rows: ParityRows, when: str) -> dict[str, list[np.ndarray]]:
    answers = context.engines.call("sequence_logprobs", 0, rows.sequences, seconds=context.deadline)
    starts = [len(prompt) - 1 for prompt in rows.prompts]
    return {
        f"{engine}{when}": [scores[start:] for scores, start in zip(answer, starts, strict=True)]
        for engine, answer in zip(context.cluster.engines, answers, strict=True)
    }


def _layout(context: StageContext, rows: ParityRows, share: bool) -> list[np.ndarray] | str:
    """Logprobs of the rows in their order, or why the layout cannot be used."""
    learn = context.config.learn
    learn = replace(learn, optim=learn.optim.model_copy(update={"share_prompts": share}))
    parts: list[Any] = context.trainers.call("layout_logprobs", 0, rows, learn, seconds=context.deadline)
    if isinstance(parts[0], str):
        return parts[0]
    found = {row: logprobs for part in parts for row, logprobs in part.items()}
    return [found[row] for row in range(len(rows.groups))]


def _gap(logprobs: Sequence[np.ndarray], truth: Sequence[np.ndarray], rows: ParityRows) -> Gap:
    if any(len(a) < len(r) - 1 for a, r in zip(logprobs, rows.responses, strict=True)):
        raise ModelError("the engine answered with fewer logprobs than it was given tokens")
    return gap(logprobs, truth)


def _figures(name: str, found: Gap, limit: Gap) -> str:
    return (
        f"{name}: {found.mean:.5f} nats on average, {found.worst:.5f} in the worst row (at most {limit.mean:.5f} and "
        f"{limit.worst:.5f})"
    )


def _require(gaps: dict[str, Gap], limit: Gap, facts: ModelFacts, config: RunConfig) -> None:
    wrong = [_figures(name, found, limit) for name, found in gaps.items() if not found.within(limit)]
    if wrong:
        agree = [_figures(name, found, limit) for name, found in gaps.items() if found.within(limit)]
        raise ModelError(
            f"{facts.architecture} ({config.model.source}) is not computed as transformers computes it, in {config.model.dtype}, "
            "so it cannot be trained here:\n"
            + "".join(f"  {line}\n" for line in wrong)
            + "".join(f"  (agrees) {line}\n" for line in agree)
            + "use another model or type (model.dtype); sync.tolerance sets another bound"
        )


def _log(record: ParityRecord, facts: ModelFacts, config: RunConfig) -> None:
    logger = get_run_logger()
    left_out = {_YARDSTICK} if record.share_prompts else {_YARDSTICK, _SHARED}
    worst = max(mean for name, (mean, _) in record.gaps.items() if name not in left_out)
    logger.info("trainer and engines agree with the plain model: %.5f nats (bound %.5f)", worst, record.bound[0])
    if not record.plain:
        logger.warning("the plain model does not fit the memory a second time: trainer and engines were compared only")
    if config.optim.share_prompts and not record.share_prompts:
        logger.warning(
            "optim.share_prompts is not used: %s would see other samples of its group (%s); each sample runs behind its own "
            "prompt instead",
            facts.architecture,
            record.reason,
        )
