"""Section about when a run must not go on as if nothing had happened."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Section


class GuardsConfig(Section):
    """Bounds that a batch and its update must keep. NaN and Inf are always out of bounds. The batch stays in the store."""

    action: Literal["stop", "skip"] = "stop"
    """Out of bounds: `stop` the run before the update is committed, or roll back to the last good version and `skip` the
    batch."""
    skips_in_a_row: int = Field(default=3, ge=0)
    """After so many skipped batches in a row the run stops all the same."""
    unscored_in_a_row: int = Field(default=3, ge=0)
    """So many batches in a row of which the reward could score no response stop the run; 0 never."""
    unlearned_in_a_row: int = Field(default=50, ge=0)
    """So many batches in a row in which no row has a gradient stop the run; 0 never. Each is a warning in the log and a note in
    `rlhf show`: a task that is solved looks like that too, as all rewards are equal."""
    min_reward: float | None = None
    """Smallest mean reward of a batch."""
    min_entropy: float | None = Field(default=None, ge=0)
    """Smallest mean entropy of the policy over a batch, in nats."""
    max_entropy: float | None = Field(default=None, gt=0)
    """Largest mean entropy of the policy over a batch, in nats."""
    max_engine_gap: float | None = Field(default=None, gt=0)
    """Largest mean absolute difference of engine and trainer logprobs over a batch."""
    max_kl: float | None = Field(default=None, gt=0)
    """Largest mean KL to the reference; needs `algorithm.kl_coef` above 0."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Largest gradient norm of an optimizer step before clipping."""

    @model_validator(mode="after")
    def _entropy_range(self) -> GuardsConfig:
        if self.min_entropy is not None and self.max_entropy is not None and self.min_entropy >= self.max_entropy:
            raise ValueError(f"guards.min_entropy = {self.min_entropy} is not below max_entropy = {self.max_entropy}")
        return self
