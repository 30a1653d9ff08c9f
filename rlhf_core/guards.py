"""Whether a batch and its update are within the bounds that the run has set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf_core.config.guards import GuardsConfig

if TYPE_CHECKING:
    from rlhf_core.manifests import StageManifest

#: Key in a manifest's details: names of the metrics that were NaN or infinite, which a record cannot hold.
NOT_FINITE = "not_finite"

#: Metric -> (key of the bound, +1 for an upper and -1 for a lower one). Those of the first are known before the update.
BATCH = {
    "reward/mean": (("min_reward", -1),),
    "policy/entropy": (("min_entropy", -1), ("max_entropy", 1)),
    "mismatch/log_ratio_abs": (("max_engine_gap", 1),),
}
UPDATE = {
    "policy/reference_kl": (("max_kl", 1),),
    "update/grad_norm": (("max_grad_norm", 1),),
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
