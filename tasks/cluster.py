"""The composition root of a running flow: reserve devices, create or reattach the actors, end them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from infra.object_store import bare_store, probe_store
from infra.placement import Plan, actor_options, is_reserved_as, plan_bundles, release, reserve
from infra.ray_cluster import connect, cores_per_node, has_gpus, rendezvous, run_on_worker
from infra.settings import load_settings
from rlhf_core.actors.group import ActorGroup, ActorSpec, create, kill
from rlhf_core.actors.leftovers import named_actors
from rlhf_core.config import RunConfig, past_config
from rlhf_core.engines.vllm_engine import EngineSettings
from rlhf_core.errors import CapacityError, StoreError
from rlhf_core.manifests import ClusterRef
from rlhf_core.models import check_model_folder
from tasks.context import lineage_of, open_run_store
from tasks.environment import check_environment
from tasks.names import namespace_of
from tasks.preflight import check_cache, context_length, model_folder
from tasks.reattach import Kept, bring_engines, claim_intact, find_position
from tasks.restore import restore_trainers
from tasks.room import make_room

if TYPE_CHECKING:
    from rlhf_core.engines.zero3_engine import TrainerSettings

#: How long a worker may take to try the store.
_PROBE_SECONDS = 120.0

#: Compiled matrix kernels that a trainer on a CPU keeps: more than one micro-batch needs, forward and backward.
_KERNELS = 128


@task(name="cluster", task_run_name="cluster", persist_result=False, cache_policy=NO_CACHE)
def start_cluster(config: RunConfig, branch: str, epoch: int, device: str | None = None) -> ClusterRef:
    """Actors at the run's policy version: those that are alive and intact stay, the others are made anew and restored.

    CapacityError if the cluster cannot place what is asked for. ``device``: what the run uses already, so that it does not
    go on with CPUs while its GPU node is away.
    """
    namespace = namespace_of(config.storage.url)
    connect(namespace)
    gpu = _use_gpu(device or config.resources.device)
    cluster = ClusterRef(
        namespace=namespace,
        branch=branch,
        epoch=epoch,
        device="gpu" if gpu else "cpu",
        trainers=_names(config, "trainer", config.resources.trainer_ranks),
        engines=_names(config, "engine", config.resources.engines),
        rewards=_names(config, "reward", config.resources.reward_workers),
    )
    if not is_reserved_as(_plan(config, gpu), reservation_name(config)):
        stop_actors(config)  # of another topology, or lost together with the cluster that held them
    where = find_position(config, cluster)
    kept = claim_intact(config, cluster, where)
    _log_kept(cluster, kept, where.version)
    gone = [name for name in _all(cluster) if name not in kept]
    kill(gone, namespace)
    if gone:
        _check_store_of_workers(config)
        _create(config, cluster, gpu, frozenset(gone))
    cluster = cluster.model_copy(update={"exact": check_environment(config, cluster)})
    if not set(cluster.trainers) <= kept.names:
        restore_trainers(config, cluster, where.version)
    if where.version and (not set(cluster.engines) <= kept.names or not kept.engines_current):
        bring_engines(config, cluster, where)
    return cluster


def _check_store_of_workers(config: RunConfig) -> None:
    """StoreError if workers cannot use the store though this process can: their environment is that of the cluster's start."""
    try:
        run_on_worker(probe_store, bare_store(open_run_store(config)), seconds=_PROBE_SECONDS)
    except OSError as error:
        raise StoreError(
            f"storage.url = {config.storage.url!r}: this process can use it, but a worker of the Ray cluster cannot: {error}. "
            "AWS_* variables have to be set where Ray is started: `rlhf down`, set them, and start again"
        ) from None


def _all(cluster: ClusterRef) -> tuple[str, ...]:
    return (*cluster.trainers, *cluster.engines, *cluster.rewards)


def _log_kept(cluster: ClusterRef, kept: Kept, version: int) -> None:
    names = _all(cluster)
    if set(names) == kept.names:
        get_run_logger().info("reattached to the living actors at policy version %d", version)
    elif kept.names:
        gone = ", ".join(name for name in names if name not in kept)
        get_run_logger().info(
            "keeping %d of %d actors; new ones take the place of %s", len(kept.names), len(names), gone
        )


def stop_actors(config: RunConfig) -> None:
    """End the run's actors and give its devices back. Nothing committed is lost."""
    namespace = namespace_of(config.storage.url)
    connect(namespace)
    kill(named_actors(config.run_id, namespace), namespace)
    release(reservation_name(config))


def _use_gpu(wanted: str) -> bool:
    if wanted == "gpu" and not has_gpus():
        raise CapacityError('resources.device = "gpu", but no node of the Ray cluster has a GPU: use "auto" or "cpu"')
    return wanted != "cpu" and has_gpus()


def _names(config: RunConfig, kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{config.run_id}-{kind}-{index}" for index in range(count))


def reservation_name(config: RunConfig) -> str:
    """Name of the run's placement group."""
    return f"{namespace_of(config.storage.url)}/{config.run_id}"


def _create(config: RunConfig, cluster: ClusterRef, gpu: bool, wanted: frozenset[str]) -> None:
    """Create the actors ``wanted`` at their places; wait until they have loaded their models."""
    plan = _plan(config, gpu)
    try:
        room = partial(make_room, config)
        group = reserve(plan, reservation_name(config), config.limits.startup_seconds, room)
    except (ValueError, TimeoutError) as error:
        raise CapacityError(str(error)) from None
    folder, store = model_folder(config), open_run_store(config)
    threads = config.resources.threads or _threads(plan)
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if gpu:
        # Expandable segments cannot be shared by CUDA IPC; the variable has an old and a new name.
        environment |= dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:False")
    from rlhf_core.actors.reward_actor import RewardActor
    from rlhf_core.actors.rollout_actor import RolloutActor
    from rlhf_core.actors.trainer_actor import TrainerActor

    engine_settings = _engine_settings(config, str(folder), gpu)
    # The host thread of a GPU engine is the bottleneck: helper threads for small CPU tensors only get in its way.
    engine_environment = environment | ({"OMP_NUM_THREADS": "1"} if gpu and not config.resources.threads else {})
    # Every micro-batch has a shape of its own: kernels kept for shapes of earlier iterations are 30 MB an iteration for nothing.
    caches = {} if gpu else dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(_KERNELS))
    staging = load_settings().home / "staging" / cluster.namespace / cluster.branch
    specs = [
        ActorSpec(
            name,
            RolloutActor,
            (engine_settings, store, _staging(config, staging / name)),
            actor_options(group, place, engine_environment),
        )
        for name, place in zip(cluster.engines, plan.engines, strict=True)
    ]
    master = rendezvous(group)
    for rank, (name, place) in enumerate(zip(cluster.trainers, plan.trainers, strict=True)):
        settings = _trainer_settings(config, cluster, str(folder), rank, master)
        options = actor_options(group, place, environment | caches)
        specs.append(ActorSpec(name, TrainerActor, (settings, store, staging), options))
    reward_options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "runtime_env": {"env_vars": environment}}
    specs += [ActorSpec(name, RewardActor, (str(folder), store), reward_options) for name in cluster.rewards]
    # vLLM measures the GPU's free memory while it starts: nobody else may take or give any in the meantime.
    first = len(cluster.engines) if gpu and config.resources.colocate else len(specs)
    for part in (specs[:first], specs[first:]):
        part = [spec for spec in part if spec.name in wanted]
        create(part, cluster.namespace)
        names = [spec.name for spec in part]
        ActorGroup(names, cluster.namespace, cluster.epoch).start(config.limits.startup_seconds)


def _plan(config: RunConfig, gpu: bool) -> Plan:
    resources = config.resources
    return plan_bundles(
        trainers=resources.trainer_ranks,
        engines=resources.engines,
        tensor_parallel=resources.tensor_parallel,
        gpu=gpu,
        colocate=resources.colocate,
    )


def _threads(plan: Plan) -> int:
    """Colocated workers take turns, so the larger kind decides how many share a node's cores."""
    return max(1, cores_per_node() // max(len(plan.trainers), len(plan.engines)))


def _engine_settings(config: RunConfig, folder: str, gpu: bool) -> EngineSettings:
    resources, facts = config.resources, check_model_folder(folder)
    if not gpu:
        check_cache(config, facts)
    return EngineSettings(
        model=folder,
        dtype=config.model.dtype,
        max_model_len=context_length(config, facts),
        max_num_seqs=max(config.rows // resources.engines, 1),
        seed=config.seed,
        device="gpu" if gpu else "cpu",
        tensor_parallel=resources.tensor_parallel,
        memory_fraction=resources.engine_memory_fraction,
        kv_cache_gib=resources.kv_cache_gib,
        sleep=gpu and resources.colocate,
        options=dict(config.generate.engine),
    )


def _staging(config: RunConfig, folder: Path) -> Any:
    from rlhf_core.actors.rollout_actor import Staging

    return Staging(folder / "segments", config.storage.staging_mib << 20, config.storage.flush_seconds)


def _trainer_settings(config: RunConfig, cluster: ClusterRef, folder: str, rank: int, master: str) -> TrainerSettings:
    from rlhf_core.engines.zero3_engine import TrainerSettings

    return TrainerSettings(
        model=folder,
        dtype=config.model.dtype,
        device=cluster.device,
        rank=rank,
        world_size=config.resources.trainer_ranks,
        master=master,
        optim=config.optim,
        algorithm=config.algorithm,
        temperature=config.generate.temperature,
        max_new_tokens=config.generate.max_new_tokens,
        seed=config.seed,
        timeout_seconds=config.limits.stage_seconds,
        reference=any(
            past_config(record).algorithm.kl_coef > 0
            for record in lineage_of(config.storage.url, cluster.branch).records
        ),
    )
