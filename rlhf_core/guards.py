"""Whether a batch and its update are within the bounds that the run has set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf_core.config.guards import GuardsConfig

if TYPE_CHECKING:
    from rlhf_core.manifests import StageManifest

#: Key in a manifest's details: names of the metrics that were NaN or infinite, which a record cannot hold.
NOT_FINITE = "not_finite"

#: Why a row has no reward: the statuses of the rewards' schema but ``ok``, each with a metric ``reward/STATUS``.
UNSCORED = ("failed_infra", "invalid_data")

#: Why nothing was learned from a batch.
NOTHING_SCORED = "nothing was scored"
NO_GRADIENT = "no row had a gradient, as no group has two different rewards"

#: Metric -> (key of the bound, +1 for an upper and -1 for a lower one). Those of the first are known before the update.
BATCH = {
    "reward/mean": (("min_reward", -1),),
    "policy/entropy": (("min_entropy", -1), ("max_entropy", 1)),
    "mismatch/log_ratio_abs": (("max_engine_gap", 1),),
}
UPDATE = {
    "policy/reference_kl": (("max_kl", 1),),
    "update/grad_norm_max": (("max_grad_norm", 1),),
}


def not_finite(*manifests: StageManifest) -> list[str]:
    """Metrics of these stages that were NaN or infinite: they are out of any bound."""
    return [f"{m.stage}: {name} is not a finite number" for m in manifests for name in m.details.get(NOT_FINITE, ())]


def violations(
    guards: GuardsConfig, metrics: Mapping[str, float], bounds: Mapping[str, tuple[tuple[str, int], ...]]
) -> list[str]:
    """What is out of bounds, as ``metric = value: reason``; empty if nothing is. A metric that is missing has no bound.

    The metrics are finite, as those of a manifest are; see ``not_finite`` for the others.
    """
    found = []
    for name, keys in bounds.items():
        value = metrics.get(name)
        if value is None:
            continue
        for key, side in keys:
            bound = getattr(guards, key)
            if bound is not None and (value - bound) * side > 0:
                found.append(f"{name} = {value:.6g}: {'above' if side > 0 else 'below'} guards.{key} = {bound:g}")
    return found


def lesson(metrics: Mapping[str, float]) -> str | None:
    """Why an iteration taught nothing, from the metrics of its stages so far; None if it taught something, or may yet.

    An iteration that learned nothing is no error by itself: the rewards of a task that is solved are all equal.
    """
    failed = [f"{metrics[f'reward/{s}']:.0f} {s}" for s in UNSCORED if metrics.get(f"reward/{s}")]
    if failed and "reward/mean" not in metrics:
        return f"{NOTHING_SCORED} ({', '.join(failed)})"
    if metrics.get("update/steps"):
        return None
    if metrics.get("update/skipped_steps"):
        return NO_GRADIENT
    return "left out by a guard" if "update/seconds" in metrics else None


def lessons(iterations: Sequence[Mapping[str, float]]) -> str | None:
    """Of how many iterations in a row, given by their metrics, something was learned; None if of each."""
    found = [lesson(metrics) for metrics in iterations]
    reasons = Counter(reason.partition(" (")[0] for reason in found if reason is not None)
    if not reasons:
        return None
    counts = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    last = next((n for n, reason in enumerate(reversed(found)) if reason is None), len(found))
    end = f", none of the last {last}" if 1 < last < len(found) else ""
    return f"{len(found) - reasons.total()} of {len(found)} iterations{end} ({counts})"
