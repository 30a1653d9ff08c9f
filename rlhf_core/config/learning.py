"""Sections about how the policy learns, and how a run is evaluated, kept, bounded and tracked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Section


class GenerateConfig(Section):
    """How rollouts are sampled."""

    prompts_per_iteration: int = Field(default=16, ge=1)
    """Prompts (groups) of one iteration."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Responses of one prompt: the size of a group."""
    max_new_tokens: int = Field(default=24, ge=1)
    """Longest response in tokens."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature, 0.01 or more; logprobs of engine and trainer are both taken after it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens whose probabilities add up to this; 1 samples from all. Like the next two and
    `min_new_tokens`, it makes the engine's distribution another one than the trainer's: see docs/numerics.md."""
    top_k: int = Field(default=0, ge=0)
    """Sample from so many of the most probable tokens; 0 samples from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens at least this many times as probable as the most probable one; 0 samples from all."""
    min_new_tokens: int = Field(default=0, ge=0)
    """No end token before so many tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a response, special tokens included; the response keeps the tokens up to the end of the text."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Tokens that end a response, beside the model's end tokens; the response keeps the token."""
    exact_groups: int = Field(default=0, ge=0)
    """Groups that an engine runs together, cut off from all others: a generation that was cut off then continues bit by bit
    as if it had not been. Slower; 0 runs all groups together, and what is generated anew after a cut is what was lost up
    to the last bits of the logprobs; a token that they turn makes what follows it another draw."""
    engine: dict[str, Any] = {}
    """Further vLLM engine arguments, passed through as they are (`max_num_seqs`, `enforce_eager`, ...), but for those that
    would change what is recorded."""

    @property
    def reshaping(self) -> list[str]:
        """What makes the engine sample from another distribution than the model's at this temperature, as `key = value`."""
        keys = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_new_tokens": 0}
        return [f"generate.{key} = {getattr(self, key)}" for key, off in keys.items() if getattr(self, key) != off]

    @model_validator(mode="after")
    def _can_end(self) -> GenerateConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"generate.min_new_tokens = {self.min_new_tokens} is above "
                f"generate.max_new_tokens = {self.max_new_tokens}: raise the one or lower the other"
            )
        return self


class AlgorithmConfig(Section):
    """Group relative policy optimization (GRPO)."""

    name: Literal["grpo"] = "grpo"
    """The estimator."""
    normalize_std: bool = True
    """Divide the centred reward by the group's standard deviation (ddof = 1)."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped above 1 + clip_high."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference (the starting policy) in the loss; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number; every denominator is global over the optimizer step."""
    importance_cap: float = Field(default=2.0, ge=0)
    """Bound on the importance weight exp(trainer - engine logprob) of a token; 0 applies no correction."""


class OptimConfig(Section):
    """The optimizer and how the batch is cut."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up; constant afterwards."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm clipping."""
    updates_per_iteration: int = Field(default=1, ge=1)
    """Optimizer steps an epoch; must divide `generate.prompts_per_iteration`."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the experience of an iteration."""
    tokens_per_microbatch: int = Field(default=4096, ge=1)
    """Padded tokens of one forward and backward pass on one rank."""
    share_prompts: bool = False
    """Run the samples of a group behind one copy of their prompt. Pays when prompts are long compared with responses."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    deterministic: bool = True
    """Compute updates with deterministic kernels only, so that a replay gives the same bits. `false` goes on without that
    where an operation has no such kernel: what is recovered then differs in its last digits, and the run says so."""


@dataclass(frozen=True)
class LearnSettings:
    """What decides how experience becomes a gradient. Travels with every job, because a replay uses the settings of the
    branch that the update belongs to."""

    optim: OptimConfig
    algorithm: AlgorithmConfig
    temperature: float
    max_new_tokens: int
    seed: int


class SyncConfig(Section):
    """How weights travel from the trainer to the engines and how that is checked."""

    bucket_mib: int = Field(default=256, ge=1)
    """Size of a packed bucket of parameters in MiB."""
    probe_sequences: int = Field(default=4, ge=0)
    """Sequences whose logprobs engine and trainer compare after every sync; 0 turns the comparison off."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest mean absolute logprob difference of the probe, and of trainer and engines from the plain model before the first
    iteration; by default 1e-4 for float32, for bfloat16 twice the plain model's own rounding error."""


class EvaluationConfig(Section):
    """Evaluation on the held-out prompts, greedy and sampled."""

    every: int = Field(default=0, ge=0)
    """Also evaluate every so many iterations; 0 evaluates only before the first and after the last."""
    samples_per_prompt: int = Field(default=4, ge=0)
    """Sampled responses a held-out prompt beside the greedy one."""


class CheckpointConfig(Section):
    """Checkpoints of the trainer. Between them, resume replays committed experience."""

    every: int = Field(default=10, ge=0)
    """Iterations between checkpoints; 0 writes none (resume then replays from the start)."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep every checkpoint whose policy version is a multiple of this; 0 keeps only the newest ones."""


class LimitsConfig(Section):
    """Deadlines and retries."""

    stage_seconds: float = Field(default=3600.0, gt=0)
    """Deadline of a stage."""
    startup_seconds: float = Field(default=900.0, gt=0)
    """Deadline for placing actors and loading models."""
    stall_seconds: float = Field(default=90.0, ge=5)
    """How long a worker may give no answer or make no step until it counts as dead and is replaced. Steps that normally take
    longer get five times their longest so far, steps that are done for the first time get `startup_seconds`."""
    retries: int = Field(default=2, ge=0)
    """Retries of the stages that may be retried in place (generate, score, advantages, sync)."""
    recoveries: int = Field(default=5, ge=0)
    """How often in a row, without an iteration finished in between, dead workers are rebuilt before the run fails."""
    restarts: int = Field(default=20, ge=0)
    """How often an automation may start a flow run again whose process has died (infra/deploy/automations.yaml)."""
    store_outage_seconds: float = Field(default=900.0, ge=0)
    """How long an object store that does not answer is waited for before a stage fails."""
    iterations_per_flow_run: int = Field(default=500, ge=1)
    """A flow run ends after so many iterations and another one goes on, so that the pages of a long run stay readable."""


class TrackingConfig(Section):
    """Where metrics go beside the store."""

    tensorboard: bool = True
    """Write TensorBoard event files to `.rlhf/tensorboard/RUN`."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the `wandb` package."""
    mlflow_experiment: str | None = None
    """MLflow experiment; needs the `mlflow` package."""

    @model_validator(mode="after")
    def _not_empty(self) -> TrackingConfig:
        for field in ("wandb_project", "mlflow_experiment"):
            if getattr(self, field) == "":
                raise ValueError(f"{field} is empty: name one or leave it out")
        return self
