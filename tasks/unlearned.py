"""Batches that teach nothing: they are said to be so, and too many in a row stop the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prefect.logging import get_run_logger

from rlhf_core.buffer import read_rows
from rlhf_core.errors import NumericsError, RewardError
from rlhf_core.guards import NO_GRADIENT, NOTHING_SCORED, lesson
from rlhf_core.manifests import StageManifest
from tasks.context import StageContext


def require_scores(context: StageContext, rewards: StageManifest) -> None:
    """RewardError, before the rewards are committed, if again not one response of the batch was scored."""
    if not _unscored(rewards.metrics):
        return
    bound, iteration = context.config.guards.unscored_in_a_row, context.iteration
    what = f"iteration {iteration}: {lesson(rewards.metrics)}; the first reason: {_first_error(context, rewards)}"
    if bound and _in_a_row(context, "score", _unscored, bound - 1):
        raise RewardError(
            f"{what}. That is number {bound} in a row (guards.unscored_in_a_row). Its rewards are not committed: mend the "
            f"reward function or the data and resume, which scores the same responses again"
        )
    get_run_logger().warning("%s", what)


def require_gradient(context: StageContext) -> None:
    """NumericsError, before the update, if again no row of the batch has a gradient."""
    rewards, experience = context.stage("score").metrics, context.stage("advantages").metrics
    if _unscored(rewards):
        reason = NOTHING_SCORED
    elif not context.config.algorithm.kl_coef and experience.get("advantages/learning_fraction") == 0:
        reason = f"{NO_GRADIENT}; the mean reward is {rewards.get('reward/mean', 0):.6g}"
    else:
        return
    bound, iteration = context.config.guards.unlearned_in_a_row, context.iteration
    if bound and _in_a_row(context, "update", _idle, bound - 1):
        raise NumericsError(
            f"iteration {iteration}: {reason}. That is number {bound} in a row that leaves the weights as they are "
            f"(guards.unlearned_in_a_row). If the task is solved, finish the run where it stands with --set "
            f"iterations={iteration}; else look at rlhf rollouts {context.run} {iteration}; to go on all the same, set "
            "guards.unlearned_in_a_row=0"
        )
    get_run_logger().warning("iteration %d: %s: the weights stay as they are", iteration, reason)


def _unscored(rewards: Mapping[str, float]) -> bool:
    reason = lesson(rewards)
    return reason is not None and reason.startswith(NOTHING_SCORED)


def _idle(update: Mapping[str, float]) -> bool:
    """Whether an update made no optimizer step, for want of a gradient."""
    return bool(update.get("update/skipped_steps")) and not update.get("update/steps")


def _in_a_row(context: StageContext, stage: str, is_one: Callable[[Mapping[str, float]], bool], count: int) -> bool:
    """Whether each of the ``count`` iterations before this one is one; there must be as many."""
    before = range(context.iteration - 1, context.iteration - 1 - count, -1)
    return context.iteration >= count and all(
        is_one(context.lineage.load(context.store, k, stage).metrics) for k in before
    )


def _first_error(context: StageContext, rewards: StageManifest) -> str:
    # Not committed yet, so it does not know its rows: its shards do.
    rows = sum(shard.rows for shard in rewards.shards)
    errors = read_rows(context.store, [rewards.model_copy(update={"rows": rows})], columns=["error"])["error"]
    return next((error for error in errors.to_pylist() if error), "none was given")
