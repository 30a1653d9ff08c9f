"""What the driver asks of actors and what they answer: small picklable values."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

from rlhf_core.config.data import RewardConfig
from rlhf_core.config.learning import LearnSettings
from rlhf_core.engines.vllm_engine import Sampling
from rlhf_core.manifests import Shard, StageManifest
from rlhf_core.metrics import Metric
from rlhf_core.rewards.host import Conditions


@dataclass(frozen=True)
class GenerateJob:
    """One engine's part of a generate stage: the prompts of some groups."""

    run: str
    iteration: int
    attempt: str
    prompts: Shard
    prompt_rows: tuple[int, ...]
    groups: tuple[int, ...]
    """Number of each prompt in the iteration; as many as ``prompt_rows``."""
    sampling: Sampling
    version: int
    seed: int
    """The run's; see ``rlhf_core.seeds``."""
    identity: str
    """See ``rlhf_core.segments.request_identity``."""
    exact_groups: int = 0
    """Groups that run together, cut off from all others; 0: all run together."""


@dataclass(frozen=True)
class ScoreJob:
    """One reward worker's part of a score stage: rows ``first .. last - 1``."""

    run: str
    iteration: int
    attempt: str
    prompts: Shard
    rollouts: StageManifest
    rows: range
    reward: RewardConfig
    conditions: Conditions


@dataclass(frozen=True)
class EvaluateJob:
    """One reward worker's part of an evaluation: rows ``first .. last - 1`` of all responses."""

    prompts: Shard
    rows: range
    reward: RewardConfig
    conditions: Conditions


@dataclass(frozen=True)
class ExperienceJob:
    """The advantages stage, the same for all ranks; each takes its share."""

    run: str
    iteration: int
    attempt: str
    rollouts: StageManifest
    rewards: StageManifest
    version: int
    learn: LearnSettings


@dataclass(frozen=True)
class UpdateJob:
    """The update stage, the same for all ranks. ``skipped``: a guard left the batch out, the weights stay as they are."""

    iteration: int
    rollouts: StageManifest
    rewards: StageManifest
    experience: StageManifest
    groups: int
    version: int
    learn: LearnSettings
    skipped: bool = False


def peak_memory_gib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass(frozen=True)
class StageResult:
    """What one actor contributes to a stage. Made in the actor's process, whose memory it therefore knows."""

    shards: tuple[Shard, ...] = ()
    metrics: dict[str, Metric] = field(default_factory=dict)
    seconds: float = 0.0
    weights_digest: str | None = None
    from_weights: str | None = None
    """Digest of the weights that the update began with; None for those of the model folder."""
    environment: str = ""
    """Id of the environment that computed the update, see ``rlhf_core.bases``."""
    peak_gib: float = field(default_factory=peak_memory_gib)
    """Peak resident memory of the actor when it had done its part."""
