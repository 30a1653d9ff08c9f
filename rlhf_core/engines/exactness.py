"""Whether a replayed update gives the same bits: deterministic kernels, what the result depends on, and a test of it.

A rank that was lost is rebuilt from a checkpoint and the committed experience after it. That leads to the same weights only if
every kernel adds in a fixed order. On a GPU that has to be asked for: by default cuBLAS may split sums over its streams, the
backward kernels of attention and indexing add atomically, and NCCL chooses algorithm and protocol by message size and load.
"""

from __future__ import annotations

import copy
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from torch import Tensor

from rlhf_core.engines.experience import Experience
from rlhf_core.engines.random_state import random_state, set_random_state
from rlhf_core.engines.rows import TokenRows, units_of
from rlhf_core.engines.weights import tensor_checksum
from rlhf_core.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from rlhf_core.engines.zero3_engine import Zero3Engine

#: What cuBLAS and NCCL read when they start. A ring with the Simple protocol adds in an order that the ranks alone decide.
_CUDA_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}

#: Packages that decide about the bits of an update.
_PACKAGES = ("prefect-rlhf", "torch", "deepspeed", "transformers", "triton")

#: Of PyTorch's message about an operation that has only a kernel that is not deterministic.
_REFUSED = re.compile(r"^(?P<operation>\S+) does not have a deterministic implementation", re.MULTILINE)

#: Rows of the self-test: groups for each rank, samples of a group, tokens of a prompt.
_GROUPS, _SAMPLES, _PROMPT = 2, 2, 8

#: Tokens of a response: on a GPU enough that sums are cut and added in parallel, which is what must not happen in any order.
_RESPONSE_CPU, _RESPONSE_GPU = 24, 512


@dataclass(frozen=True)
class SelfTest:
    """Whether two updates from one state gave the same bits on every rank."""

    exact: bool
    reason: str
    """Why not; empty if they did."""
    seconds: float


def use_deterministic_kernels(device: str) -> None:
    """From here on this process computes with deterministic kernels only; an operation without one raises RuntimeError.

    To be called before the process uses CUDA or NCCL.
    """
    if device != "cpu":
        os.environ.update(_CUDA_ENVIRONMENT)
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that was not written; filling it would only cost bandwidth.
    torch.utils.deterministic.fill_uninitialized_memory = False


def describe_environment(device: str, world_size: int, deterministic: bool) -> dict[str, Any]:
    """What the bits of an update depend on beside its inputs, the same on all ranks; collective.

    Plain JSON values. Equal descriptions and deterministic kernels promise equal bits.
    """
    facts: dict[str, Any] = {
        "device": device,
        "ranks": world_size,
        "threads": torch.get_num_threads(),
        "deterministic": deterministic,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }
    mine = {"processor": f"{_processor()} {torch.backends.cpu.get_cpu_capability()}"}
    if device != "cpu":
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # The processor computes nothing that counts there.
        mine = {"processor": f"{properties.name}, {properties.multi_processor_count} multiprocessors"}
    facts["processors"] = [part["processor"] for part in _from_all_ranks(mine, world_size)]
    return facts


def self_test(engine: Zero3Engine) -> SelfTest:
    """Apply one tiny update twice, each time from a loaded copy of the state, and compare the bits; collective.

    The engine is left as it was. ConfigError names an operation that has no deterministic kernel.
    """
    started = time.monotonic()
    state = SavedState(engine)
    before = _state_digest(engine)
    found = []
    for _ in range(2):
        try:
            experience = _tiny_experience(engine)
            engine.step(experience, torch.arange(len(experience.tokens.prompt_lengths)))
        except RuntimeError as error:
            raise missing_kernel(error) or error from None
        found.append(_state_digest(engine))
        state.load(engine)
    if _state_digest(engine) != before:
        raise IntegrityError("the state of a rank cannot be saved and loaded: after the self-test it was another one")
    if found[0] == before:
        raise IntegrityError("the self-test's update changed nothing")
    if engine.device.type != "cpu":
        torch.cuda.empty_cache()  # an engine may share the device
    ranks = [rank for rank, (one, two) in enumerate(zip(*found, strict=True)) if one != two]
    reason = f"two updates from one state gave different bits on rank {ranks[0]}" if ranks else ""
    return SelfTest(not ranks, reason, time.monotonic() - started)


class SavedState:
    """A copy of everything that an update of this rank changes, in memory: on its device where there is room."""

    def __init__(self, engine: Zero3Engine) -> None:
        self._steps, self._random = engine.steps, random_state()
        self._counters = {name: getattr(engine.engine, name) for name in self._COUNTERS}
        state = engine.engine.optimizer.state_dict()
        size = sum(tensor.nbytes for tensor in _tensors(state))
        self._state = _copied(state, engine.device if _has_room(engine.device, size) else torch.device("cpu"))

    _COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

    def load(self, engine: Zero3Engine) -> None:
        """Bring the rank back; collective. May be called again."""
        zero = engine.engine.optimizer
        zero.checkpoint_event_prologue()
        # PyTorch's optimizer adopts tensors that it is given, and would change the copy with the next step.
        states: list[Any] = [None] * engine.settings.world_size
        states[engine.settings.rank] = _copied(self._state, None)
        zero.load_state_dict(states, load_optimizer_states=True)
        zero.checkpoint_event_epilogue()
        engine.steps = self._steps
        for name, value in self._counters.items():
            setattr(engine.engine, name, value)
        set_random_state(self._random)


def _tiny_experience(engine: Zero3Engine) -> Experience:
    """Random tokens with advantages +1 and -1 in every group; old logprobs as the policy has them, so nothing is clipped."""
    settings = engine.settings
    response = _response_tokens(engine)
    rows = _GROUPS * _SAMPLES * settings.world_size
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(engine.vocabulary, (rows, length), generator=generator, dtype=torch.int32)
        return ids, torch.arange(rows + 1) * length

    prompts, prompt_offsets = tokens(_PROMPT)
    prompts = prompts[::_SAMPLES].repeat_interleave(_SAMPLES, dim=0)
    responses, response_offsets = tokens(response)
    table = TokenRows(prompts.flatten(), prompt_offsets, responses.flatten(), response_offsets)
    groups = torch.arange(rows) // _SAMPLES
    units = units_of(list(range(rows)), groups, settings.optim.share_prompts)
    scores = engine.logprobs(table, engine.plan(table, units)[settings.rank], settings.temperature)
    old = torch.full((rows, response), -1.0)
    for row, (logprobs, _) in scores.items():
        old[row] = logprobs
    sign = 1.0 - 2.0 * (torch.arange(rows) % _SAMPLES)
    return Experience(
        tokens=table,
        groups=groups,
        behaviour_logprobs=old.flatten(),
        old_logprobs=old.flatten(),
        advantages=sign.repeat_interleave(response),
        scored=torch.ones(rows, dtype=torch.bool),
        ref_logprobs=old.flatten() if settings.algorithm.kl_coef > 0 else None,
    )


def _response_tokens(engine: Zero3Engine) -> int:
    wanted = _RESPONSE_CPU if engine.device.type == "cpu" else _RESPONSE_GPU
    context = getattr(engine.policy.model.config.get_text_config(), "max_position_embeddings", None) or wanted + _PROMPT
    return max(1, min(wanted, context - _PROMPT))


def _state_digest(engine: Zero3Engine) -> list[Any]:
    """For each rank, what tells the bits of its part of the float32 weights and of the optimizer's state from others."""
    zero, found = engine.engine.optimizer, []
    for index, master in enumerate(zero.fp32_partitioned_groups_flat):
        state = {"weights": master, **zero.optimizer.state.get(master, {})}
        found += [(index, name, _bits(t)) for name, t in state.items() if torch.is_tensor(t) and t.numel() > 1]
    return _from_all_ranks(found, engine.settings.world_size)


def _bits(tensor: Tensor) -> int | str:
    if tensor.device.type != "cpu":
        return tensor_checksum(tensor)
    # Three times as fast as the checksum, which is made for being the same on every device.
    words = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return blake3(memoryview(words), max_threads=torch.get_num_threads()).hexdigest()


def _from_all_ranks(mine: Any, world_size: int) -> list[Any]:
    if world_size == 1:
        return [mine]
    found: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(found, mine)
    return found


def missing_kernel(error: RuntimeError) -> ConfigError | None:
    """What to say of an operation that has only a kernel that is not deterministic; None for any other error."""
    refused = _REFUSED.search(str(error))
    if refused is None:
        return None
    return ConfigError(
        f"optim.deterministic = true, but {refused['operation']} has no deterministic kernel in PyTorch {torch.__version__} "
        "for this model here. optim.deterministic = false goes on without exactness: a run that has lost a rank is then "
        "replayed to slightly other weights, which it says"
    )


def _copied(value: Any, device: torch.device | None) -> Any:
    """A deep copy; tensors go to ``device``, or stay where they are for None."""
    if torch.is_tensor(value):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, device) for item in value]
    return copy.deepcopy(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if torch.is_tensor(value):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _tensors(item)


def _has_room(device: torch.device, size: int) -> bool:
    """Whether the copy, another copy while it is loaded, and Adam's moments fit beside what is there."""
    return device.type == "cpu" or torch.cuda.mem_get_info(device)[0] > 5 * size


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return names[1].strip() if names else platform.machine()


def _driver() -> str:
    version = Path("/sys/module/nvidia/version")
    if version.exists():
        return version.read_text(encoding="ascii").strip()
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\S+)", _read(Path("/proc/driver/nvidia/version")))
    return found[1] if found else "unknown"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
