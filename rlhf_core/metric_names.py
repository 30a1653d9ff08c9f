"""Every metric of an iteration by name: one name belongs to one stage and has one meaning.

A name that two stages would record is an error here, and a stage that records another one's name is refused where its
manifest is made. docs/numerics.md has this table. Names in a group are written with ``*``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.manifests import StageManifest


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a metric says."""

    stage: str
    over: str
    """The rows, tokens or steps that it is taken over."""
    reduction: str


_ROWS = "all rows"
_TOKENS = "response tokens of all rows"
_SCORED = "rows with a reward"
_LEARNT = "response tokens of rows with a gradient, in each pass over them, by the policy of that step"
_STEPS = "optimizer steps that were made"

#: Stage -> name -> (over what, reduction). ``commit`` is what only the iteration's record has.
_BY_STAGE: dict[str, dict[str, tuple[str, str]]] = {
    "generate": {
        "generate/tokens": (_TOKENS, "sum"),
        "generate/new_tokens": ("response tokens of rows that this attempt sampled", "sum"),
        "generate/response_length": (_ROWS, "mean"),
        "generate/response_length_std": (_ROWS, "std"),
        "generate/response_length_max": (_ROWS, "max"),
        "generate/response_length_min": (_ROWS, "min"),
        "generate/finished_fraction": ("all rows; those that ended by themselves", "mean"),
        "generate/truncated_fraction": ("all rows; those cut at `generate.max_new_tokens`", "mean"),
        "generate/engine_seconds": (
            "calls of this attempt to engines: the longest of those made together, and after deaths the next ones",
            "sum",
        ),
        "generate/flush_seconds": ("the same; what they waited for the store at the end", "max"),
        "generate/tokens_per_second": ("`generate/new_tokens` / `generate/engine_seconds`", "ratio"),
        "memory/engine_peak_gib": ("engines, from their start to the end of the stage", "max"),
    },
    "score": {
        "reward/mean": (_SCORED, "mean"),
        "reward/std": (_SCORED, "std"),
        "reward/failed_infra": ("rows with this status", "sum"),
        "reward/invalid_data": ("rows with this status", "sum"),
        "reward/component_*": ("rows that the function scored, before weight and clip", "mean"),
        "memory/reward_peak_gib": ("reward workers, from their start to the end of the stage", "max"),
    },
    "advantages": {
        "policy/entropy": (f"{_TOKENS}, by the policy that sampled them", "mean"),
        "mismatch/tokens": (_TOKENS, "sum"),
        "mismatch/log_ratio": (_TOKENS, "mean"),
        "mismatch/log_ratio_abs": (_TOKENS, "mean"),
        "mismatch/log_ratio_abs_max": (_TOKENS, "max"),
        "mismatch/kl_k3": (_TOKENS, "mean"),
        "mismatch/chi_square": (_TOKENS, "mean"),
        "mismatch/truncated_fraction": (_TOKENS, "mean"),
        "advantages/equal_groups": ("groups of two or more rewards, all equal", "sum"),
        "advantages/degenerate_groups": ("groups with fewer than two rewards", "sum"),
        "advantages/learning_fraction": ("all rows; those with tokens and an advantage other than 0", "mean"),
        "advantages/seconds": ("ranks", "max"),
    },
    "update": {
        "policy/tokens": (_LEARNT, "sum"),
        "policy/clip_low_fraction": (_LEARNT, "mean"),
        "policy/clip_high_fraction": (_LEARNT, "mean"),
        "policy/ratio": (_LEARNT, "mean"),
        "policy/ratio_max": (_LEARNT, "max"),
        "policy/ratio_clamped_tokens": (_LEARNT, "sum"),
        "policy/old_new_kl_k1": (_LEARNT, "mean"),
        "policy/old_new_kl_k3": (_LEARNT, "mean"),
        "policy/reference_kl": (_LEARNT, "mean"),
        "policy/reference_kl_clamped": (_LEARNT, "sum"),
        "policy/loss": (f"{_STEPS}; each is the loss of the whole step, all ranks", "mean"),
        "update/entropy": (_LEARNT, "mean"),
        "update/grad_norm": (f"{_STEPS}; before clipping, all ranks", "mean"),
        "update/grad_norm_max": (f"{_STEPS}; before clipping, all ranks", "max"),
        "update/learning_rate": (_STEPS, "mean"),
        "update/steps": (_STEPS, "sum"),
        "update/skipped_steps": ("optimizer steps in which no row had a gradient", "sum"),
        "update/seconds": ("ranks", "max"),
        "memory/trainer_peak_gib": ("ranks, from their start to the end of the stage", "max"),
    },
    "sync": {
        "sync/push_seconds": ("the push of all weights", "value"),
        "sync/bytes": ("ranks, for each engine that they serve", "sum"),
        "sync/probe_gap": ("response tokens of the probe; the engine that is farthest off", "mean"),
        "sync/probe_gap_max": ("response tokens of the probe, all engines", "max"),
    },
    "commit": {
        "seconds/*": ("the stage of this name, its last attempt, as the driver sees it", "value"),
        "store/bytes": ("shards of the iteration", "sum"),
    },
}


def _meanings() -> dict[str, Meaning]:
    found: dict[str, Meaning] = {}
    for stage, names in _BY_STAGE.items():
        for name, (over, reduction) in names.items():
            if name in found:
                raise ValueError(f"metric {name!r} belongs to the stages {found[name].stage!r} and {stage!r}")
            found[name] = Meaning(stage, over, reduction)
    return found


#: Name -> meaning.
METRICS = _meanings()
_GROUPS = tuple(name.removesuffix("*") for name in METRICS if name.endswith("*"))


def meaning_of(name: str) -> Meaning | None:
    """What the metric means; None for one that is in no table."""
    if name in METRICS:
        return METRICS[name]
    group = next((prefix for prefix in _GROUPS if name.startswith(prefix)), None)
    return METRICS[f"{group}*"] if group is not None else None


def require_own(stage: str, names: Iterable[str]) -> None:
    """ValueError if a name belongs to another stage."""
    for name in names:
        meaning = meaning_of(name)
        if meaning is not None and meaning.stage != stage:
            raise ValueError(f"metric {name!r} of stage {stage!r} is one of stage {meaning.stage!r}: name it otherwise")


def of_iteration(stages: Mapping[str, StageManifest]) -> dict[str, float]:
    """The metrics of all stages, in the order given, each under one name.

    Manifests from before names had one owner may hold a name of another stage: it is ``STAGE/thing`` here. None is lost and
    none overwrites another.
    """
    found: dict[str, float] = {}
    for stage, manifest in stages.items():
        for name, value in manifest.metrics.items():
            meaning = meaning_of(name)
            own = name not in found and (meaning is None or meaning.stage == stage)
            found[name if own else f"{stage}/{name.partition('/')[2]}"] = value
    return found
