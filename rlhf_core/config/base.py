"""What every section of the configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys are errors; bounds live in the types; every field has a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
