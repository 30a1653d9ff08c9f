"""What every section of the configuration has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from rlhf_core.errors import ConfigError


class Section(BaseModel):
    """Frozen; unknown keys are errors; bounds live in the types; every field has a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def expand_home(path: str) -> str:
    """The path with `~` or `~user` at its beginning (or behind `file://`) replaced by that home folder.

    ConfigError if there is no such home. Everything else stays as it is.
    """
    scheme = "file://" if path.startswith("file://~") else ""
    local = path.removeprefix(scheme)
    if not local.startswith("~"):
        return path
    try:
        return f"{scheme}{Path(local).expanduser()}"
    except RuntimeError:  # how pathlib says that it knows no such user
        user = local.partition("/")[0]
        raise ConfigError(f"there is no home folder {user!r}; a folder of this name is './{user}'") from None


#: What may name a place on this machine. Expanded where the configuration is read, so that all who use it see one path.
LocalPath = Annotated[str, AfterValidator(expand_home)]
