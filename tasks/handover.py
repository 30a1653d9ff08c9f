"""Who holds the GPUs when trainer and engine share them. On CPU, and with devices of their own, nothing happens."""

from __future__ import annotations

from tasks.context import StageContext


def to_trainers(context: StageContext) -> None:
    """Engines give their memory up, weights included: the next sync overwrites them. Trainers come back."""
    if _shared(context):
        context.engines.call("sleep", True, seconds=context.deadline)
        context.trainers.call("reload", seconds=context.deadline)


def to_engines(context: StageContext) -> None:
    """Trainers move to the host; the engines woke up with the last sync. Both directions may be repeated."""
    if _shared(context):
        context.trainers.call("offload", seconds=context.deadline)


def trainers_at_start(context: StageContext) -> None:
    """Trainers get the memory of engines that have just started; these keep their weights, which no sync will bring again."""
    if _shared(context):
        context.engines.call("sleep", False, seconds=context.deadline)
        context.trainers.call("reload", seconds=context.deadline)


def engines_at_start(context: StageContext) -> None:
    """The way back from ``trainers_at_start``."""
    if _shared(context):
        context.trainers.call("offload", seconds=context.deadline)
        context.engines.call("wake", seconds=context.deadline)


def _shared(context: StageContext) -> bool:
    return context.config.resources.colocate and context.cluster.device == "gpu"
