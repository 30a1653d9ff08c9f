"""What the command line shows of a run: small frozen values, made from manifests, rendered elsewhere."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    """Base: frozen, closed. None means not known (yet)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunRow(View):
    """One run in the list of runs."""

    run: str
    created: datetime | None
    iterations_done: int
    iterations: int
    """Planned iterations."""
    state: str
    """`running`, `finished`, `stopped`, ..."""
    reward_last: float | None = None
    """Mean sampled reward of the newest iteration."""
    reward_before: float | None = None
    """Greedy reward on the held-out prompts with the starting policy."""
    reward_after: float | None = None
    """The same with the final policy."""


class IterationView(View):
    """One iteration of a run."""

    iteration: int
    stage_states: dict[str, Literal["committed", "missing"]]
    stage_seconds: dict[str, float] = {}
    metrics: dict[str, float] = {}


class RunView(View):
    """One run in full."""

    run: str
    state: str
    policy_version: int
    iterations: int
    """Planned iterations."""
    iterations_done: int
    reward_before: float | None = None
    reward_after: float | None = None
    tokens_per_second: float | None = None
    """Generated tokens a second of the generate stages."""
    export: str | None = None
    """Folder of the exported model."""
    next_step: str
    """What to do now, as a sentence or a command."""
    stages: tuple[IterationView, ...] = ()
    """The iterations that were begun, in order."""


class RolloutSample(View):
    """One rollout, readable."""

    sample_id: str
    prompt: str
    response: str
    reward: float | None
    """None when the sample could not be scored."""
    components: dict[str, float] = {}
    answer: str | None = None
    finish_reason: str
    tokens: int
    """Response tokens."""
    advantage: float | None = None
