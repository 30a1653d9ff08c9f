"""What Ray still holds for a run: its named actors and its placement group, whoever made them."""

from __future__ import annotations

import re


def named_actors(run: str, namespace: str) -> list[str]:
    """Names of the run's living actors in this namespace, sorted. The process must be connected to Ray."""
    import ray

    pattern = re.compile(rf"{re.escape(run)}-(trainer|engine|reward)-\d+")
    listed = ray.util.list_named_actors(all_namespaces=True)
    return sorted(a["name"] for a in listed if a["namespace"] == namespace and pattern.fullmatch(a["name"]))


def is_reserved(name: str) -> bool:
    """Whether a placement group of this name holds devices or waits for them."""
    import ray

    groups = ray.util.placement_group_table().values()
    return any(group["name"] == name and group["state"] != "REMOVED" for group in groups)
