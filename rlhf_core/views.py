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
    """NaN for one that was NaN or infinite; one of nothing (a mean reward without any reward) is not there."""
    note: str | None = None
    """Why the iteration taught nothing, or that a metric is not finite; None for an ordinary one."""


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
    """Generated tokens a second of the generate stages that are shown."""
    export: str | None = None
    """Folder of the exported model."""
    learned: str | None = None
    """From how many of the iterations that are shown something was learned, and why not from the others; None: from each."""
    prompts_dropped: int = 0
    """Prompts of the source that were left out because they are too long."""
    next_step: str
    """What to do now, as a sentence or a command."""
    stages: tuple[IterationView, ...] = ()
    """The iterations that were begun, in order."""
    lineage: tuple[str, ...] = ()
    """For each branch that shares stages, the newest first: what it is and where it begins."""
    replayed: tuple[str, ...] = ()
    """Replays that could not give the recorded weights, and why; the run went on from what they gave."""


class RolloutSample(View):
    """One rollout, readable."""

    sample_id: str
    prompt: str
    response: str
    """Text as the reward saw it, so without special tokens; may be empty. Before it is scored, how many tokens there are."""
    status: str | None = None
    """`ok`, or why there is no reward; None: not scored yet."""
    error: str | None = None
    """What the reward said about a sample that it could not score."""
    reward: float | None
    """None when the sample could not be scored, or is not scored yet."""
    components: dict[str, float | None] = {}
    """Reward function -> its value; None where it had none."""
    answer: str | None = None
    finish_reason: str
    tokens: int
    """Response tokens."""
    advantage: float | None = None


def reward_text(sample: RolloutSample) -> str:
    """The sample's reward, or why it has none."""
    if sample.reward is not None:
        return f"{sample.reward:.3g}"
    if sample.status is None:
        return "not scored yet"
    return f"none ({sample.status}: {sample.error or 'no reason given'})"


class Damage(View):
    """One object that is not what the records say, or that contradicts the others."""

    key: str
    kind: Literal["missing", "damaged", "inconsistent"]
    """Not there; other bytes than recorded; or whole, but in contradiction to other records."""
    iteration: int | None = None
    stage: str | None = None
    problem: str
    remedy: str
    """What it can be rebuilt from, and how."""


class IterationAudit(View):
    """What was proven of one iteration: samples = trained + left out + waiting + retired + unproven."""

    iteration: int
    states: dict[str, Literal["intact", "retired", "damaged", "missing", "open"]]
    """Stage -> state of its record and shards; `retired`: record intact, shards deleted on purpose."""
    shared: dict[str, str] = {}
    """Stage -> branch where it lies, if that is not the run's head."""
    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    """Response tokens."""
    trained: int = 0
    left_out: dict[str, int] = {}
    """Reason -> samples that were in the batch and taught nothing."""
    waiting: int = 0
    """Samples whose update is not committed yet."""
    retired: int = 0
    """Samples whose rows were deleted on purpose: only their number is known."""
    unproven: int = 0
    """Samples whose fate cannot be told because of damage."""
    skipped: str | None = None
    """Why a guard left the whole batch out."""


class EpochUse(View):
    """How often the prompts of a table were used in one epoch over it."""

    table: str
    """Key of the prompt table."""
    epoch: int
    prompts: int
    """Prompts in the table."""
    used: int
    """Uses in all."""
    least: int
    """Uses of the prompt that was used least."""
    most: int


class AuditView(View):
    """What `rlhf audit` proves of a run."""

    run: str
    proven: bool
    """Whether there is no damage."""
    branches: tuple[str, ...] = ()
    """The branches that the run consists of, its head first."""
    iterations: int = 0
    """Planned iterations."""
    iterations_done: int = 0
    records: int
    """Sealed records read and verified."""
    objects: int = 0
    """Shards and files read and verified."""
    bytes: int = 0
    """Bytes of them."""
    objects_retired: int = 0
    """Shards that retention deleted."""
    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    """Response tokens."""
    trained: int = 0
    left_out: dict[str, int] = {}
    """Reason -> samples."""
    waiting: int = 0
    retired: int = 0
    unproven: int = 0
    epochs: tuple[EpochUse, ...] = ()
    checkpoints: tuple[int, ...] = ()
    """Policy versions of the intact checkpoints."""
    stages: tuple[IterationAudit, ...] = ()
    """The iterations that were begun, in order."""
    replayed: tuple[str, ...] = ()
    """Replays that could not give the recorded weights, and why; the run went on from what they gave."""
    damage: tuple[Damage, ...] = ()
