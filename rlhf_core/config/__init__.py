"""The configuration of a run: pydantic, frozen, closed. Importing it loads nothing heavy."""

from rlhf_core.config.run import RunConfig, contradictions, load_config, override_config, parse_config

__all__ = ["RunConfig", "contradictions", "load_config", "override_config", "parse_config"]
