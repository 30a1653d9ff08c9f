"""Connecting to the Ray cluster that the environment names."""

from __future__ import annotations

from typing import Any


def connect(namespace: str) -> None:
    """Connect this process as a driver; a second call does nothing. ConnectionError if there is no cluster."""
    import ray

    if not ray.is_initialized():
        # Actors import from the installed packages; the driver's folder is not shipped to them.
        ray.init(namespace=namespace, configure_logging=False, log_to_driver=False)


def reconnect(namespace: str) -> None:
    """As ``connect``, after leaving a cluster that no longer answers (its head was restarted)."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        try:
            ray.nodes()
            return
        except (RayError, RuntimeError, ConnectionError):
            ray.shutdown()
    connect(namespace)


def has_gpus() -> bool:
    """Whether any living node offers a GPU."""
    import ray

    return any(node["Alive"] and node["Resources"].get("GPU", 0) >= 1 for node in ray.nodes())


def cores_per_node() -> int:
    """Cores of the smallest living node."""
    import ray

    return int(min((node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]), default=1.0))


def run_on_worker(function: Any, *arguments: Any, seconds: float) -> Any:
    """Call the function in a worker process somewhere in the cluster. Its own errors come out as themselves."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(ray.remote(function).options(num_cpus=0).remote(*arguments), timeout=seconds)
    except RayTaskError as error:
        raise error.cause from None


def rendezvous(group: Any) -> str:
    """``host:port`` on the node of the placement group's first bundle, where rank 0 will listen."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
    return ray.get(ray.remote(_free_address).options(num_cpus=0, scheduling_strategy=strategy).remote())


def _free_address() -> str:
    import socket

    import ray

    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
