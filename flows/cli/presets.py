"""From the words of the command line to a configuration with a name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from rlhf_core.config import RunConfig, load_config
from rlhf_core.config.base import expand_home
from rlhf_core.errors import ConfigError

#: A run's name has 63 characters at most; the time takes 16 of them.
_STEM_LENGTH = 47


def load_run_config(preset: str, overrides: Sequence[str] = (), run: str | None = None) -> RunConfig:
    """The configuration of a preset with its overrides and a name. ConfigError says what is wrong with them."""
    path = find_preset(preset)
    named = [*overrides, f"run={json.dumps(run)}"] if run is not None else list(overrides)
    config = load_config(path, named)
    return config if config.run is not None else config.model_copy(update={"run": new_run_name(path.stem)})


def find_preset(preset: str) -> Path:
    """The file of a preset: a path, or the bare name of one that comes with the project."""
    path = Path(expand_home(preset))
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"preset {preset!r} is a folder: name a TOML file in it")
    shipped = shipped_presets()
    if preset in shipped:
        return shipped[preset]
    names = ", ".join(sorted(shipped)) or "(none)"
    raise ConfigError(f"preset {preset!r} does not exist: name a TOML file or one of the presets {names}")


def shipped_presets() -> dict[str, Path]:
    """The presets in ``infra/presets`` by name."""
    folder = Path(str(files("infra"))) / "presets"
    return {path.stem: path for path in folder.glob("*.toml")}


def new_run_name(stem: str, now: datetime | None = None) -> str:
    """``STEM-YYYYmmdd-HHMMSS`` in local time; what a run's name cannot hold becomes ``-``."""
    clean = re.sub(r"[^A-Za-z0-9_]+", "-", stem)[:_STEM_LENGTH].strip("-_") or "run"
    return f"{clean}-{(now or datetime.now()):%Y%m%d-%H%M%S}"
