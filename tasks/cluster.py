"""The composition root of a running flow: reserve devices, create or reattach the actors, end them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from infra.placement import Plan, actor_options, plan_bundles, release, reserve
from infra.ray_cluster import connect, cores_per_node, has_gpus, rendezvous
from rlhf_core.actors.group import ActorGroup, ActorSpec, create, kill, statuses
from rlhf_core.config import RunConfig
from rlhf_core.engines.vllm_engine import EngineSettings
from rlhf_core.errors import CapacityError
from rlhf_core.manifests import ClusterRef
from rlhf_core.models import check_model_folder
from tasks.context import lineage_of, open_run_store
from tasks.preflight import context_length, model_folder
from tasks.progress import load_progress
from tasks.restore import restore

if TYPE_CHECKING:
    from rlhf_core.engines.zero3_engine import TrainerSettings

#: Ray namespace of all runs; actor names carry the run.
NAMESPACE = "rlhf"

#: How long living actors of an earlier driver have to answer before they are replaced.
_REATTACH_SECONDS = 20.0


@task(name="cluster", task_run_name="cluster", persist_result=False, cache_policy=NO_CACHE)
def start_cluster(config: RunConfig, branch: str, epoch: int) -> ClusterRef:
    """Actors at the run's policy version: those of an earlier driver if they are intact, else new ones, restored.

    CapacityError if the cluster cannot place what is asked for.
    """
    connect(NAMESPACE)
    gpu = _use_gpu(config)
    cluster = ClusterRef(
        namespace=NAMESPACE,
        branch=branch,
        epoch=epoch,
        device="gpu" if gpu else "cpu",
        trainers=_names(config, "trainer", config.resources.trainer_ranks),
        engines=_names(config, "engine", config.resources.engines),
        rewards=_names(config, "reward", config.resources.reward_workers),
    )
    version = load_progress(open_run_store(config), lineage_of(config.storage.url, branch)).policy_version
    if _reattach(cluster, version):
        get_run_logger().info("reattached to the living actors at policy version %d", version)
        return cluster
    stop_actors(config)
    _create(config, cluster, gpu)
    restore(config, cluster, version)
    return cluster


def stop_actors(config: RunConfig) -> None:
    """End the run's actors and give its devices back. Nothing committed is lost."""
    connect(NAMESPACE)
    resources = config.resources
    counts = {
        "trainer": resources.trainer_ranks,
        "engine": resources.engines,
        "reward": resources.reward_workers,
    }
    kill([name for kind, count in counts.items() for name in _names(config, kind, count)], NAMESPACE)
    release(_reservation(config))


def _use_gpu(config: RunConfig) -> bool:
    wanted = config.resources.device
    if wanted == "gpu" and not has_gpus():
        raise CapacityError('resources.device = "gpu", but no node of the Ray cluster has a GPU: use "auto" or "cpu"')
    return wanted != "cpu" and has_gpus()


def _names(config: RunConfig, kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{config.run_id}-{kind}-{index}" for index in range(count))


def _reservation(config: RunConfig) -> str:
    return f"rlhf-{config.run_id}"


def _reattach(cluster: ClusterRef, version: int) -> bool:
    """Claim the actors if all of them live, answer, and trainers and engines hold exactly ``version``."""
    names = (*cluster.trainers, *cluster.engines, *cluster.rewards)
    found = statuses(names, cluster.namespace, _REATTACH_SECONDS)
    if set(found) != set(names):
        return False
    if any(found[name]["version"] != version for name in (*cluster.trainers, *cluster.engines)):
        return False
    ActorGroup(names, cluster.namespace, cluster.epoch).call_claim(_REATTACH_SECONDS)
    return True


def _create(config: RunConfig, cluster: ClusterRef, gpu: bool) -> None:
    plan = _plan(config, gpu)
    try:
        group = reserve(plan, _reservation(config), config.limits.startup_seconds)
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
    specs = [
        ActorSpec(name, RolloutActor, (engine_settings, store), actor_options(group, place, engine_environment))
        for name, place in zip(cluster.engines, plan.engines, strict=True)
    ]
    master = rendezvous(group)
    for rank, (name, place) in enumerate(zip(cluster.trainers, plan.trainers, strict=True)):
        settings = _trainer_settings(config, str(folder), gpu, rank, master)
        specs.append(ActorSpec(name, TrainerActor, (settings, store), actor_options(group, place, environment)))
    reward_options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "runtime_env": {"env_vars": environment}}
    specs += [ActorSpec(name, RewardActor, (str(folder), store), reward_options) for name in cluster.rewards]
    # vLLM measures the GPU's free memory while it starts: nobody else may take or give any in the meantime.
    first = len(cluster.engines) if gpu and config.resources.colocate else len(specs)
    for part in (specs[:first], specs[first:]):
        create(part, cluster.namespace)
        names = [spec.name for spec in part]
        ActorGroup(names, cluster.namespace, cluster.epoch).call_claim(config.limits.startup_seconds)


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
    resources = config.resources
    return EngineSettings(
        model=folder,
        dtype=config.model.dtype,
        max_model_len=context_length(config, check_model_folder(folder)),
        max_num_seqs=max(config.rows // resources.engines, 1),
        seed=config.seed,
        device="gpu" if gpu else "cpu",
        tensor_parallel=resources.tensor_parallel,
        memory_fraction=resources.engine_memory_fraction,
        kv_cache_gib=resources.kv_cache_gib,
        sleep=gpu and resources.colocate,
        options=dict(config.generate.engine),
    )


def _trainer_settings(config: RunConfig, folder: str, gpu: bool, rank: int, master: str) -> TrainerSettings:
    from rlhf_core.engines.zero3_engine import TrainerSettings

    return TrainerSettings(
        model=folder,
        dtype=config.model.dtype,
        device="gpu" if gpu else "cpu",
        rank=rank,
        world_size=config.resources.trainer_ranks,
        master=master,
        optim=config.optim,
        algorithm=config.algorithm,
        temperature=config.generate.temperature,
        max_new_tokens=config.generate.max_new_tokens,
        seed=config.seed,
        timeout_seconds=config.limits.stage_seconds,
    )
