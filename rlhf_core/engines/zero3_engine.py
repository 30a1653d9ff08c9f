"""The training engine: one DeepSpeed ZeRO-3 rank. The only module that knows DeepSpeed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.algorithms.batching import minibatches, plan_microbatches
from rlhf_core.algorithms.correction import importance_weights
from rlhf_core.algorithms.kl import token_kl
from rlhf_core.algorithms.losses import add_kl, policy_loss
from rlhf_core.algorithms.masked import Denominators, count, length_mask, masked_sum, pad_rows
from rlhf_core.config.learning import AlgorithmConfig, LearnSettings, OptimConfig
from rlhf_core.engines.build_lock import clear_abandoned
from rlhf_core.engines.checkpoint_names import CheckpointNames
from rlhf_core.engines.exactness import describe_environment, use_deterministic_kernels
from rlhf_core.engines.experience import Experience
from rlhf_core.engines.heap import trim_heap
from rlhf_core.engines.imports import import_for_good
from rlhf_core.engines.offload import Offloader
from rlhf_core.engines.policy_model import PolicyModel, exported_name, load_policy
from rlhf_core.engines.random_state import random_state, set_random_state
from rlhf_core.engines.reshard import optimizer_files, reshard
from rlhf_core.engines.rows import TokenRows, gather_rows, units_of
from rlhf_core.engines.weights import BucketSpec, WeightsDigest, pack, plan_buckets
from rlhf_core.errors import NumericsError
from rlhf_core.metrics import Max, Mean, Metric, Sum, merge_metrics
from rlhf_core.progress import Progress

#: Elements of ZeRO's reduce bucket on a GPU and on a CPU. DeepSpeed's default of 5e8 would allocate 1 GB for a small model.
_REDUCE_BUCKET, _REDUCE_BUCKET_CPU = 50_000_000, 8_000_000

#: Elements that the optimizer steps at once. Its copy of the gradients and its temporaries take 12 bytes for each of them;
#: DeepSpeed's default of 1e9 makes that 12 bytes for every parameter of a small model.
_SUB_GROUP = 16_000_000

#: Bytes of a checkpoint for each parameter: 12, and what padding and records take.
_CHECKPOINT_BYTES = 14

#: Largest bucket of parameters that are gathered to be looked at here, in bytes. There are two buffers of this size.
_LOCAL_BUCKET = 64 << 20


@dataclass(frozen=True)
class TrainerSettings:
    """Everything a rank needs to start."""

    model: str
    dtype: str
    device: str
    rank: int
    world_size: int
    master: str
    optim: OptimConfig
    algorithm: AlgorithmConfig
    temperature: float
    max_new_tokens: int
    seed: int
    timeout_seconds: float
    reference: bool = False
    """Load the reference model: some update of the run, or of one that it goes on from, has a KL term."""


def to_deepspeed_config(optim: OptimConfig, dtype: str, device: str, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Pure. Gradients accumulate and reduce in float32 whatever the weights are.

    A single rank keeps its parameters in place: there is nobody to gather them from.
    """
    bucket = _REDUCE_BUCKET_CPU if device == "cpu" else _REDUCE_BUCKET
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # boundaries are set by hand: their number differs from step to step
        "gradient_clipping": optim.max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": device != "cpu",
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "sub_group_size": _SUB_GROUP,
            "stage3_param_persistence_threshold": _persistence(world_size),
        },
        "wall_clock_breakdown": False,
        "steps_per_print": 1_000_000_000,
    }


def _persistence(world_size: int) -> int:
    """Parameters of up to this many elements are never partitioned away."""
    return 100_000 if world_size > 1 else 2**62


class Zero3Engine:
    """One rank. Every method that runs the model or moves parameters must be called on all ranks."""

    def __init__(self, settings: TrainerSettings, progress: Progress | None = None) -> None:
        self.settings, self.progress = settings, progress or Progress()
        if settings.optim.deterministic:
            use_deterministic_kernels(settings.device)
        _join(settings)
        import deepspeed

        policy = load_policy(settings.model, settings.dtype, settings.optim.gradient_checkpointing)
        optim = settings.optim
        optimizer = torch.optim.AdamW(
            [p for p in policy.parameters() if p.requires_grad],
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
            weight_decay=optim.weight_decay,
        )
        config = to_deepspeed_config(optim, settings.dtype, settings.device, settings.world_size)
        self.engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
        self.policy: PolicyModel = self.engine.module
        self.device = torch.device(self.engine.device)
        self.offloader = Offloader(self.engine, self.device)
        self.steps = 0
        self._broken: list[str] = []  # losses of the step under way that are not finite
        self.reference = self._load_reference() if settings.reference else None
        self._parameters = {exported_name(n): p for n, p in self.policy.named_parameters()}
        self.vocabulary = int(self.policy.model.config.get_text_config().vocab_size)
        deterministic = settings.optim.deterministic
        self.environment = describe_environment(settings.device, settings.world_size, deterministic)
        shapes = {n: tuple(p.ds_shape) for n, p in self._parameters.items()}
        self._names = CheckpointNames(self.policy.model, shapes)
        trim_heap()

    def use(self, learn: LearnSettings) -> None:
        """Learn with these settings from now on. What the constructor fixed stays: gradient checkpointing, the reference."""
        optim = learn.optim
        for group in self.engine.optimizer.param_groups:
            group.update(betas=optim.betas, eps=optim.epsilon, weight_decay=optim.weight_decay)
        self.engine.optimizer.clip_grad = optim.max_grad_norm
        self.settings = replace(
            self.settings,
            optim=optim,
            algorithm=learn.algorithm,
            temperature=learn.temperature,
            max_new_tokens=learn.max_new_tokens,
            seed=learn.seed,
        )

    def _load_reference(self) -> Any:
        import deepspeed

        reference = load_policy(self.settings.model, self.settings.dtype, gradient_checkpointing=False).eval()
        settings = self.settings
        config = to_deepspeed_config(settings.optim, settings.dtype, settings.device, settings.world_size)
        threshold = _persistence(settings.world_size)
        config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": threshold}
        engine, *_ = deepspeed.initialize(model=reference, config=config)
        return engine

    @torch.no_grad()
    def logprobs(
        self,
        rows: TokenRows,
        microbatches: Sequence[Sequence[Sequence[int]]],
        temperature: float,
        reference: bool = False,
        training: bool = False,
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Forward passes over this rank's micro-batches of units: row -> (logprobs, entropies), float32 on the CPU.

        ``training``: in the mode that updates run in, which must be the same function.
        """
        engine = self.reference if reference else self.engine
        if engine is None:
            raise RuntimeError("no reference model was loaded: algorithm.kl_coef is 0")
        engine.train(training)
        result: dict[int, tuple[Tensor, Tensor]] = {}
        for units in microbatches:
            batch = rows.batch(units).to(self.device)
            logprobs, entropy = engine(batch, temperature)
            sizes, indices = batch.lengths_K.tolist(), [row for unit in units for row in unit]
            parts = zip(indices, logprobs.cpu().split(sizes), entropy.cpu().split(sizes), strict=False)
            result.update({row: (lp, en) for row, lp, en in parts})
            self.progress.count("micro-batch")
        engine.train()
        return result

    def plan(self, tokens: TokenRows, units: Sequence[Sequence[int]]) -> list[list[list[list[int]]]]:
        """Micro-batches of units for every rank; the same number for each."""
        if not units:
            return [[] for _ in range(self.settings.world_size)]
        lengths, responses = tokens.unit_lengths(units)
        plan = plan_microbatches(
            lengths.numpy(),
            self.settings.world_size,
            self.settings.optim.tokens_per_microbatch,
            response_lengths=responses.numpy(),
        )
        return [[[list(units[u]) for u in microbatch] for microbatch in rank] for rank in plan]

    def update(
        self, experience: Experience, groups: int, iteration: int, progress: Callable[[float], None] | None = None
    ) -> dict[str, Metric]:
        """All optimizer steps of one iteration. Returns this rank's metrics; raises NumericsError on a NaN or Inf.

        The experience is the same on every rank; each takes its share of every step.
        """
        optim, settings = self.settings.optim, self.settings
        parts: list[dict[str, Metric]] = []
        for epoch in range(optim.epochs):
            order = minibatches(groups, optim.updates_per_iteration, (settings.seed, iteration, epoch))
            for number, chosen in enumerate(order):
                rows = torch.isin(experience.groups, torch.tensor(chosen)).nonzero().squeeze(-1)
                parts.append(self.step(experience, rows))
                if progress is not None:
                    progress((epoch * len(order) + number + 1) / (optim.epochs * len(order)))
        trim_heap()
        return merge_metrics(parts)

    def step(self, experience: Experience, rows: Tensor) -> dict[str, Metric]:
        """One optimizer step on these rows [n] int64 of the experience; none if they teach nothing. Collective."""
        settings, tokens = self.settings, experience.tokens
        responses = tokens.response_lengths[rows]
        learns = experience.active[rows] & (responses > 0)
        units = units_of(rows[learns].tolist(), experience.groups, settings.optim.share_prompts)
        plan = self.plan(tokens, units)[settings.rank]
        if not plan:  # nothing to learn from in this step: the weights and the optimizer stay as they are
            return {"update/skipped_steps": Sum(1.0 if settings.rank == 0 else 0.0)}
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.steps + 1)
        denominators = count(responses[experience.scored[rows]].numpy(), norm_length=settings.max_new_tokens)
        parts = []
        for number, local in enumerate(plan):
            parts.append(self._microbatch(experience, local, denominators, last=number == len(plan) - 1))
        return merge_metrics([*parts, self._apply()])

    def _microbatch(
        self, experience: Experience, units: list[list[int]], denominators: Denominators, last: bool
    ) -> dict[str, Metric]:
        settings, algorithm = self.settings, self.settings.algorithm
        rows = [row for unit in units for row in unit]
        batch = experience.tokens.batch(units).to(self.device)
        self.engine.set_gradient_accumulation_boundary(last)
        flat, entropy = self.engine(batch, settings.temperature)
        width = max(1, int(batch.lengths_K.max()))
        mask = length_mask(batch.lengths_K, width)

        def column(values: Tensor) -> Tensor:
            offsets = experience.tokens.response_offsets
            part = gather_rows(values, offsets, rows) if rows else values[:0]
            return pad_rows(part.to(self.device), batch.lengths_K, width)

        logprobs, old = pad_rows(flat, batch.lengths_K, width), column(experience.old_logprobs)
        weights = None
        if algorithm.importance_cap > 0:
            weights = importance_weights(old, column(experience.behaviour_logprobs), mask, algorithm.importance_cap)
        loss, stats = policy_loss(
            logprobs, old, column(experience.advantages), mask,
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, weights_BT=weights,
            mode=algorithm.aggregation, denominators=denominators,
        )  # fmt: skip
        metrics: dict[str, Metric] = stats.as_metrics()
        if experience.ref_logprobs is not None:
            kl, clamped = token_kl(logprobs, column(experience.ref_logprobs), mask, algorithm.kl_estimator)
            loss, _ = add_kl(
                loss, kl, mask, kl_coef=algorithm.kl_coef, mode=algorithm.aggregation, denominators=denominators
            )
            metrics["policy/reference_kl"] = Mean(float(masked_sum(kl, mask)), float(mask.sum()))
            metrics["policy/reference_kl_clamped"] = Sum(float(clamped))
        value = float(loss.detach())
        if not math.isfinite(value):
            # Raised after the step: a rank that left here would keep the others waiting in a collective until it times out.
            self._broken.append(f"the loss is {value} in rows {rows[:8]}")
        # DeepSpeed averages gradients over ranks; the loss is already a share of a global mean.
        self.engine.backward(loss * settings.world_size)
        self.engine.step()
        self.progress.count("micro-batch")
        metrics["policy/loss"] = Mean(value)  # parts of ranks and micro-batches add up; _apply counts the step
        metrics["update/entropy"] = Mean(float(entropy.detach().sum()), float(entropy.numel()))
        return metrics

    def _apply(self) -> dict[str, Metric]:
        """Bookkeeping after the optimizer step that the last micro-batch triggered."""
        norm = float(self.engine.get_global_grad_norm())
        broken, self._broken = self._broken, []
        if broken or not math.isfinite(norm):
            # The norm is global, so every rank raises, and DeepSpeed has skipped the step.
            reasons = "; ".join([f"the gradient norm is {norm} at step {self.steps + 1}", *broken])
            raise NumericsError(f"rank {self.settings.rank}: {reasons}")
        self.steps += 1
        self.progress.count("optimizer step")
        mine = 1.0 if self.settings.rank == 0 else 0.0  # the norm is global: count it once
        return {
            "policy/loss": Mean(0.0, mine),
            "update/grad_norm": Mean(norm * mine, mine),
            "update/grad_norm_max": Max(norm),
            "update/learning_rate": Mean(self.learning_rate(self.steps) * mine, mine),
            "update/steps": Sum(mine),
        }

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimizer step 1, 2, ...: linear warm-up, then constant."""
        optim = self.settings.optim
        return optim.learning_rate * min(1.0, step / optim.warmup_steps if optim.warmup_steps else 1.0)

    def buckets(self, max_bytes: int) -> Iterator[tuple[BucketSpec, Tensor]]:
        """Gather the policy bucket by bucket, as its checkpoint has it: (layout, flat uint8 [bytes]). Each tensor is reused by the
        next but one."""
        from deepspeed import zero

        dtype = getattr(torch, self.settings.dtype)
        tensors = self._names.tensors
        specs = plan_buckets(((name, dtype, tensor.shape) for name, tensor in tensors.items()), max_bytes)
        size = max(s.bytes for s in specs)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(min(2, len(specs)))]
        for spec in specs:
            flat = buffers[spec.index % len(buffers)]
            sources = [tensors[entry.name].parameter for entry in spec.entries]
            gathered = {name: self._parameters[name] for name in dict.fromkeys(sources)}
            with zero.GatheredParameters(list(gathered.values())):
                used = pack(spec, self._names.parts({name: p.detach() for name, p in gathered.items()}), flat)
            self.progress.count("bucket")
            yield spec, used

    def digest(self, max_bytes: int = _LOCAL_BUCKET) -> str:
        """Digest of the whole policy; the same on every rank and in every engine."""
        from rlhf_core.engines.weights import unpack

        digest = WeightsDigest()
        for spec, flat in self.buckets(max_bytes):
            for name, tensor in unpack(spec, flat):
                digest.add(name, tensor)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole policy on the CPU of rank 0, by the checkpoint's names; None on other ranks."""
        from rlhf_core.engines.weights import unpack

        result: dict[str, Tensor] = {}
        for spec, flat in self.buckets(_LOCAL_BUCKET):
            if self.settings.rank == 0:
                result.update({name: tensor.cpu().clone() for name, tensor in unpack(spec, flat)})
        return result if self.settings.rank == 0 else None

    def checkpoint_bytes(self) -> int:
        """About the bytes that ``save`` writes here: this rank's share of float32 weights and two moments, and some more."""
        return _CHECKPOINT_BYTES * sum(p.ds_numel for p in self._parameters.values()) // self.settings.world_size

    def save(self, folder: str, tag: str) -> None:
        """Write this rank's part of a checkpoint below ``folder/tag``; collective. No ``latest`` file: it is no commit."""
        state = {"steps": self.steps, "random": random_state()}
        self.engine.save_checkpoint(folder, tag=tag, client_state=state, save_latest=False)

    def load(self, folder: str, tag: str) -> None:
        """Read a checkpoint written by ``save`` with the same number of ranks; collective."""
        missing = FileNotFoundError(f"no checkpoint {tag!r} below {folder!r}")
        if not Path(folder, tag).is_dir():
            raise missing  # DeepSpeed would fail with a bare AssertionError
        path, state = self.engine.load_checkpoint(folder, tag=tag)
        if path is None or state is None:
            raise missing
        self.steps = int(state["steps"])
        set_random_state(state["random"])
        del state
        trim_heap()

    def load_resharded(self, folder: str, tag: str, scratch: str) -> None:
        """As ``load``, from a checkpoint of another number of ranks, all files of which lie below ``folder``; collective.

        Weights and optimizer state are the same bit by bit. ``scratch``: a folder of this rank's own for its new files.
        """
        self.engine.save_checkpoint(scratch, tag=tag, client_state={}, save_latest=False)
        rank, ranks = self.settings.rank, self.settings.world_size
        old = [torch.load(path, map_location="cpu", weights_only=False) for path in optimizer_files(Path(folder))]
        (mine,) = Path(scratch).rglob(f"*zero_pp_rank_{rank}_*optim_states.pt")
        template = torch.load(mine, map_location="cpu", weights_only=False)
        sizes = [p.ds_numel for p in self.policy.parameters() if p.requires_grad]
        reshard(old, template, sizes, rank, ranks)
        torch.save(template, mine)
        state = next(Path(folder).rglob("*zero_pp_rank_0_*model_states.pt"))
        steps = torch.load(state, map_location="cpu", weights_only=False, mmap=True)["steps"]
        path, _ = self.engine.load_checkpoint(scratch, tag=tag)
        if path is None:
            raise FileNotFoundError(f"no checkpoint {tag!r} below {scratch!r}")
        self.steps = int(steps)
        trim_heap()

    def close(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _join(settings: TrainerSettings) -> None:
    """Enter the process group of the ranks."""
    from datetime import timedelta

    host, _, port = settings.master.rpartition(":")
    os.environ.update(
        MASTER_ADDR=host,
        MASTER_PORT=port,
        RANK=str(settings.rank),
        WORLD_SIZE=str(settings.world_size),
        LOCAL_RANK="0",
        DS_ACCELERATOR="cpu" if settings.device == "cpu" else "cuda",
    )
    if settings.device == "cpu":
        # DeepSpeed compiles an optimizer that is not used here, which imports all of PyTorch's compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import_for_good(("deepspeed", "transformers.models.auto.modeling_auto"))
    import deepspeed
    from torch.utils.cpp_extension import get_default_build_root

    clear_abandoned(
        Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    )  # DeepSpeed builds a helper
    torch.manual_seed(settings.seed)
    deepspeed.init_distributed(
        dist_backend="gloo" if settings.device == "cpu" else "nccl",
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=settings.timeout_seconds),
        verbose=False,
    )
