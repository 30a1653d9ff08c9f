"""From the configuration that an older version stored to the one of this version, step by step.

The schema number of a stored configuration counts the renames, removals and changes of meaning since the first. Whoever makes
one appends a function to ``UPGRADES`` that takes the dictionary of the schema before to the next one. A knob that is only
added needs none: what a stored configuration lacks has its default, so its default must be what was done before there was
the knob; else a step writes down what was done then.

A step is pure and total: it returns a new dictionary, and keys or whole sections may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

#: The n-th step (from 1) takes schema n to n + 1.
UPGRADES: tuple[Upgrade, ...] = ()


def newest_schema() -> int:
    """Number of the schema that this version writes."""
    return len(UPGRADES) + 1


def upgrade(raw: Mapping[str, Any], schema: int) -> dict[str, Any]:
    """A configuration of an older schema as one of the newest; ``raw`` stays as it is."""
    config = deepcopy(dict(raw))
    for step in UPGRADES[schema - 1 :]:
        config = step(config)
    return config


def new_names(path: Sequence[str], value: Any) -> list[str]:
    """What a key of any older schema is called now, as dotted names; empty if it was none or its meaning is gone."""
    raw = value
    for part in reversed(path):
        raw = {part: raw}
    for schema in range(1, newest_schema()):
        names = [name for name, _ in flat(upgrade(raw, schema))]
        if names != [".".join(path)]:
            return names
    return []


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values of everything in a configuration; an empty section is a value."""
    pairs: list[tuple[str, Any]] = []
    for key, item in config.items():
        pairs += flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) and item else [(f"{prefix}{key}", item)]
    return pairs
