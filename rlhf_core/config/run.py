"""The configuration of a run: composition, rules across sections, loading."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from rlhf_core.config.base import Section
from rlhf_core.config.data import ModelConfig, PromptsConfig, RewardConfig
from rlhf_core.config.guards import GuardsConfig
from rlhf_core.config.learning import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    GenerateConfig,
    LearnSettings,
    LimitsConfig,
    OptimConfig,
    SyncConfig,
    TrackingConfig,
)
from rlhf_core.config.place import ResourcesConfig, StorageConfig
from rlhf_core.config.upgrades import flat, new_names
from rlhf_core.errors import ConfigError

#: A run id is also a folder, an actor namespace and a Prefect name.
RUN_ID_PATTERN = r"^[A-Za-z0-9](?:[A-Za-z0-9_-]|\.[A-Za-z0-9_-])*$"

#: Keys that may differ when a run is resumed: they do not change what is learned. (`storage.url` says where to look.)
CHANGEABLE = (
    "iterations",
    "checkpoint",
    "evaluation.every",
    "reward.batch_size",
    "reward.environment",
    "reward.retries",
    "reward.timeout_seconds",
    "limits",
    "guards",
    "tracking",
    "storage",
    "sync.bucket_mib",
    "optim.deterministic",
)


class RunConfig(Section):
    """Everything that defines a run."""

    run: str | None = Field(default=None, pattern=RUN_ID_PATTERN, max_length=63)
    """Name of the run: letters, digits, `-`, `_`, single dots; at most 63. Left out, a new name is made."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of prompts, sampling and order."""
    iterations: int = Field(default=20, ge=1, le=1_000_000)
    """Iterations of the run."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    generate: GenerateConfig = GenerateConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resources: ResourcesConfig = ResourcesConfig()
    storage: StorageConfig = StorageConfig()
    limits: LimitsConfig = LimitsConfig()
    guards: GuardsConfig = GuardsConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def run_id(self) -> str:
        """The run's name. ConfigError if none was given or made yet."""
        if self.run is None:
            raise ConfigError("run: no name yet; name the run or let the command make one")
        return self.run

    @property
    def rows(self) -> int:
        """Rollouts of one iteration."""
        return self.generate.prompts_per_iteration * self.generate.samples_per_prompt

    @property
    def learn(self) -> LearnSettings:
        """What decides how experience becomes a gradient."""
        generate = self.generate
        return LearnSettings(self.optim, self.algorithm, generate.temperature, generate.max_new_tokens, self.seed)

    @property
    def probe_tolerance(self) -> float:
        """Largest mean absolute logprob difference between engine and trainer after a sync."""
        if self.sync.tolerance is not None:
            return self.sync.tolerance
        return 1e-4 if self.model.dtype == "float32" else 0.15

    @model_validator(mode="after")
    def _batches_divide(self) -> RunConfig:
        prompts, updates = self.generate.prompts_per_iteration, self.optim.updates_per_iteration
        if prompts % updates:
            raise ValueError(
                f"generate.prompts_per_iteration = {prompts} is not divisible by optim.updates_per_iteration = {updates}: "
                f"take {prompts + updates - prompts % updates} prompts, or another number of updates"
            )
        ranks, rows = self.resources.trainer_ranks, self.rows // updates
        if rows < ranks:
            raise ValueError(
                f"resources.trainer_ranks = {ranks} but an optimizer step has {rows} rollouts: "
                "raise generate.prompts_per_iteration or generate.samples_per_prompt, or use fewer ranks"
            )
        if self.generate.samples_per_prompt < 2:
            raise ValueError("generate.samples_per_prompt = 1, but GRPO compares the samples of a group: use 2 or more")
        return self

    @model_validator(mode="after")
    def _guards_can_be_seen(self) -> RunConfig:
        if self.guards.max_kl is not None and not self.algorithm.kl_coef:
            raise ValueError(
                f"guards.max_kl = {self.guards.max_kl}, but algorithm.kl_coef = 0 loads no reference to compare with: "
                "set algorithm.kl_coef, or leave guards.max_kl out"
            )
        return self

    @model_validator(mode="after")
    def _engine_samples_from_the_trainers_distribution(self) -> RunConfig:
        compared = {
            f"algorithm.importance_cap = {self.algorithm.importance_cap}": self.algorithm.importance_cap > 0,
            f"guards.max_engine_gap = {self.guards.max_engine_gap}": self.guards.max_engine_gap is not None,
        }
        both = [setting for setting, is_set in compared.items() if is_set]
        if self.generate.reshaping and both:
            raise ValueError(
                f"{', '.join(self.generate.reshaping)}: the engine samples from a part of the model's distribution, but "
                f"{' and '.join(both)} compares its logprobs with the trainer's, which are over all tokens: set "
                "algorithm.importance_cap = 0 and no guards.max_engine_gap, or sample from the whole distribution"
            )
        return self

    @model_validator(mode="after")
    def _prompts_fit(self) -> RunConfig:
        arithmetic = self.prompts.arithmetic
        if self.prompts.source == "arithmetic" and arithmetic.low > arithmetic.high:
            raise ValueError(
                f"prompts.arithmetic.low = {arithmetic.low} is above prompts.arithmetic.high = {arithmetic.high}"
            )
        if self.evaluation.every and not self.prompts.heldout:
            raise ValueError(
                "evaluation.every is set but prompts.heldout = 0: hold prompts out, or set evaluation.every = 0"
            )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML preset and apply ``section.key=value`` overrides. ConfigError names the file and every bad key."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"preset {str(path)!r} does not exist") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of too many digits
        raise ConfigError(f"preset {str(path)!r} is not TOML: {error}") from None
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw, origin=str(path))


def parse_config(raw: Mapping[str, Any], origin: str = "config") -> RunConfig:
    """Validate a plain mapping. ConfigError lists every problem with its key, value and reason."""
    try:
        return RunConfig.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError(f"{origin}:\n" + "\n".join(f"  {line}" for line in _explain(error))) from None


def contradictions(stored: RunConfig, wanted: RunConfig, changeable: Sequence[str] = CHANGEABLE) -> list[str]:
    """Keys in which a resumed run would differ from the run it continues, as ``key: stored -> wanted``."""
    old, new = (dict(flat(config.model_dump(mode="json"))) for config in (stored, wanted))
    keys = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in keys
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in changeable)
    ]


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set what ``section.key=value`` says in a plain dictionary. ConfigError if it says nothing."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: write section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
    node[last] = value


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"{where} = {problem['input']!r}: unknown key{_hint(problem['loc'], problem['input'])}"
        elif not where:
            yield problem["msg"].removeprefix("Value error, ")
        else:
            yield f"{where} = {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"


def _hint(loc: tuple[int | str, ...], value: Any) -> str:
    from difflib import get_close_matches

    names = [part for part in loc if isinstance(part, str)]
    if len(names) == len(loc) and (renamed := new_names(names, value)):
        return f"; it is now {' and '.join(map(repr, renamed))}"
    near = get_close_matches(str(loc[-1]), _keys_beside(loc), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    model: Any = RunConfig
    for part in loc[:-1]:
        if isinstance(part, str) and part in getattr(model, "model_fields", {}):
            model = model.model_fields[part].annotation
    return list(getattr(model, "model_fields", {}))
