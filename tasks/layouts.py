"""Which layouts of the trainer's batches a run may use, and how far trainer and engine may be apart: what was found before its
first iteration."""

from __future__ import annotations

from dataclasses import replace

from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.config.learning import LearnSettings
from rlhf_core.manifests import ParityRecord
from rlhf_core.records import find_record
from tasks.context import StageContext


def find_parity(context: StageContext) -> ParityRecord | None:
    """What was found. None for runs that began before it was looked for: they go on with the layout of their configuration."""
    return find_record(context.store, layout.parity(context.lineage.branch_of_version(0)), ParityRecord)


def learn_settings(context: StageContext, config: RunConfig) -> LearnSettings:
    """The settings of ``config``; samples share their prompt only where that gives the model's own function."""
    learn, found = config.learn, find_parity(context)
    if found is None or found.share_prompts or not learn.optim.share_prompts:
        return learn
    return replace(learn, optim=learn.optim.model_copy(update={"share_prompts": False}))


def probe_bound(context: StageContext) -> float:
    """Largest mean absolute logprob difference between trainer and engine after a sync, in nats."""
    config, found = context.config, find_parity(context)
    return config.probe_tolerance if found is None or config.sync.tolerance is not None else found.bound[0]
