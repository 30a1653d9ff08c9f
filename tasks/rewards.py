"""Reward functions in files, where every worker finds them."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config import RunConfig
from rlhf_core.config.data import RewardConfig, RewardFunctionConfig


def reward_for_workers(config: RunConfig) -> RewardConfig:
    """The reward section with absolute file names: workers do not run in the driver's folder."""
    return config.reward.model_copy(update={"functions": tuple(_absolute(f) for f in config.reward.functions)})


def _absolute(function: RewardFunctionConfig) -> RewardFunctionConfig:
    path, colon, attribute = function.function.rpartition(":")
    if not path.endswith(".py"):
        return function
    return function.model_copy(update={"function": f"{Path(path).resolve()}{colon}{attribute}"})
