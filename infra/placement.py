"""Which worker goes where: pure planning, and the Ray placement group that reserves it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

#: Placement groups of runs are named PREFIX, then which store, a slash, and the run.
PREFIX = "rlhf-"

#: Shares of a device that a trainer rank and an engine take of one bundle when they share it. They must add up to 1 or less.
COLOCATED_SHARE = 0.45


@dataclass(frozen=True)
class Place:
    """Where one actor goes: the bundles it may use (several for tensor parallelism) and its share of each."""

    bundles: tuple[int, ...]
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Plan:
    """Bundles to reserve and a place for every actor."""

    bundles: tuple[dict[str, float], ...]
    trainers: tuple[Place, ...]
    engines: tuple[Place, ...]

    @property
    def total(self) -> dict[str, float]:
        """Resources of all bundles together."""
        names = sorted({name for bundle in self.bundles for name in bundle})
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in names}


def plan_bundles(*, trainers: int, engines: int, tensor_parallel: int, gpu: bool, colocate: bool) -> Plan:
    """One bundle a device. Colocated: rank i and the engine on device i share it; else everybody has devices of his own.

    On CPU a bundle is one core, whatever the number of threads: colocated workers take turns.
    """
    devices = engines * tensor_parallel
    bundle = {"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": 1.0}
    count = max(trainers, devices) if colocate else trainers + devices
    share = COLOCATED_SHARE if colocate else 1.0
    first = 0 if colocate else trainers
    gpus = share if gpu else 0.0
    return Plan(
        bundles=tuple(dict(bundle) for _ in range(count)),
        trainers=tuple(Place((i,), share, gpus) for i in range(trainers)),
        engines=tuple(
            Place(tuple(range(first + e * tensor_parallel, first + (e + 1) * tensor_parallel)), share, gpus)
            for e in range(engines)
        ),
    )


def reserve(plan: Plan, name: str, seconds: float, make_room: Callable[[], None] = lambda: None) -> Any:
    """Create the detached placement group of this name, or find it; wait until it is placed.

    ``make_room`` is called now and then while it waits, to free devices that others hold.
    Raises ValueError naming what is asked for and what is there when the cluster can never hold it, TimeoutError when it
    stays occupied for ``seconds``.
    """
    import ray
    from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group

    _require_fit(plan, ray.nodes())
    try:
        group = get_placement_group(name)
        if list(group.bundle_specs) != [dict(b) for b in plan.bundles]:
            remove_placement_group(group)
            raise ValueError(name)
    except ValueError:
        group = placement_group([dict(b) for b in plan.bundles], strategy="PACK", name=name, lifetime="detached")
    deadline = time.monotonic() + seconds
    while not group.wait(timeout_seconds=min(10.0, max(1.0, seconds))):
        if time.monotonic() > deadline:
            free = _readable(ray.available_resources())
            remove_placement_group(group)
            raise TimeoutError(
                f"the run needs {_readable(plan.total)} and waited {seconds:.0f} s; free now: {free}. {_holders(name)}"
                "End what occupies the cluster, or ask for fewer trainer ranks or engines."
            )
        free = _readable(ray.available_resources())
        logger.warning("waiting for %s; free now: %s. %s", _readable(plan.total), free, _holders(name))
        make_room()
    return group


def is_reserved_as(plan: Plan, name: str) -> bool:
    """Whether a placement group of this name exists and holds exactly the bundles of the plan."""
    from ray.util.placement_group import get_placement_group

    try:
        return list(get_placement_group(name).bundle_specs) == [dict(b) for b in plan.bundles]
    except ValueError:
        return False


def release(name: str) -> None:
    """Give the reservation back, if there is one."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    try:
        group = get_placement_group(name)
    except ValueError:
        return
    remove_placement_group(group)


def actor_options(group: Any, place: Place, environment: dict[str, str]) -> dict[str, Any]:
    """Ray options that put an actor at its place. An engine over several bundles only captures the group: its workers,
    which vLLM starts, take the devices."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    spread = len(place.bundles) > 1
    environment = dict(environment)
    if spread:
        environment |= {
            "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, place.bundles)),
            "VLLM_RAY_PER_WORKER_GPUS": str(place.gpus),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
    return {
        "num_cpus": 0 if spread else place.cpus,
        "num_gpus": 0 if spread else place.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=place.bundles[0],
            placement_group_capture_child_tasks=True,
        ),
        "runtime_env": {"env_vars": environment},
    }


def _require_fit(plan: Plan, nodes: list[dict[str, Any]]) -> None:
    there: dict[str, float] = {}
    for node in nodes:
        if node["Alive"]:
            for name in ("CPU", "GPU"):
                there[name] = there.get(name, 0.0) + node["Resources"].get(name, 0.0)
    short = [name for name, amount in plan.total.items() if amount > there.get(name, 0.0)]
    if short:
        raise ValueError(
            f"the run asks for {_readable(plan.total)} ({len(plan.trainers)} trainer ranks, {len(plan.engines)} engines), "
            f"but the Ray cluster has {_readable(there)}: lower resources.trainer_ranks or resources.engines, "
            "colocate them, or add nodes"
        )


def holders() -> list[str]:
    """Names of the placement groups with which runs hold devices, sorted."""
    import ray

    groups = ray.util.placement_group_table().values()
    return sorted(g["name"] for g in groups if g["state"] == "CREATED" and g["name"].startswith(PREFIX))


def _holders(name: str) -> str:
    """Which other runs hold devices, and what ends them; empty if none does."""
    runs = [other.partition("/")[2] for other in holders() if other != name]
    if not runs:
        return ""
    return f"Devices are held by {', '.join(runs)}; `rlhf gc {runs[0]}` ends the actors of a run that nobody drives. "


def _readable(resources: dict[str, float]) -> str:
    amounts = [f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if name in resources]
    return ", ".join(amounts) or "nothing"
