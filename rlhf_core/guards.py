"""Whether a batch and its update are within the bounds that the run has set."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf_core.config.guards import GuardsConfig

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


def violations(
    guards: GuardsConfig, metrics: Mapping[str, float], bounds: Mapping[str, tuple[tuple[str, int], ...]]
) -> list[str]:
    """What is out of bounds, as ``metric = value: reason``; empty if nothing is. A metric that is missing has no bound."""
    found = []
    for name, keys in bounds.items():
        value = metrics.get(name)
        if value is None:
            continue
        if not math.isfinite(value):
            found.append(f"{name} = {value}: not a finite number")
            continue
        for key, side in keys:
            bound = getattr(guards, key)
            if bound is not None and (value - bound) * side > 0:
                found.append(f"{name} = {value:.6g}: {'above' if side > 0 else 'below'} guards.{key} = {bound:g}")
    return found
