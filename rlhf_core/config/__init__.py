"""The configuration of a run: pydantic, frozen, closed. Importing it loads nothing heavy."""

from rlhf_core.config.run import RunConfig, contradictions, load_config, parse_config
from rlhf_core.config.sampling import check_sampling
from rlhf_core.config.stored import config_fields, past_config, stored_config, upgraded_fields

__all__ = [
    "RunConfig",
    "check_sampling",
    "config_fields",
    "contradictions",
    "load_config",
    "parse_config",
    "past_config",
    "stored_config",
    "upgraded_fields",
]
