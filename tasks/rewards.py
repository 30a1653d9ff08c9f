"""Reward functions as they are asked for: the files where every worker finds them, and what they find around themselves."""

from __future__ import annotations

from pathlib import Path

from infra.settings import inherited_environment, shell_environment
from rlhf_core.config import RunConfig
from rlhf_core.config.data import RewardConfig, RewardFunctionConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards.host import Conditions


def reward_for_workers(config: RunConfig) -> RewardConfig:
    """The reward section with absolute file names."""
    return config.reward.model_copy(update={"functions": tuple(_absolute(f) for f in config.reward.functions)})


def conditions(config: RunConfig) -> Conditions:
    """This process's folder, and of its environment what reward functions may see. Never a parameter of a flow or a task:
    values may be secrets. RewardError if a variable that they need is not set."""
    names = config.reward.environment
    environment = shell_environment(names)
    missing = [name for name in names if name not in environment]
    if missing:
        raise RewardError(
            f"reward.environment names {', '.join(missing)}, which is not set here: set it for this command "
            "(for a deployment: where its worker starts), or take it out of the list"
        )
    return Conditions(str(Path.cwd()), environment, frozenset(inherited_environment().keys() - environment.keys()))


def _absolute(function: RewardFunctionConfig) -> RewardFunctionConfig:
    path, colon, attribute = function.function.rpartition(":")
    if not path.endswith(".py"):
        return function
    return function.model_copy(update={"function": f"{Path(path).expanduser().resolve()}{colon}{attribute}"})
