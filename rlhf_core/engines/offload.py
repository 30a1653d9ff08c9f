"""Moving a ZeRO-3 rank between GPU and host, so that an inference engine can use the GPU in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Offloader:
    """Moves one DeepSpeed engine. While it is away nothing may be computed, gathered or saved."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self.away = False
        self._host: dict[tuple[int, str], Tensor] = {}

    def offload(self) -> None:
        """To the host. On a CPU, or away already: nothing."""
        if self.device.type == "cpu" or self.away:
            return
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        # DeepSpeed moves master weights and moments for its own FusedAdam only; those of torch's AdamW are moved below.
        self.engine.offload_states(include=[State.lp_params, State.lp_grads, State.contiguous_grad_buffer])
        for key, tensor in self._optimizer_tensors():
            if key not in self._host:
                self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
            self._host[key].copy_(tensor.data)
            tensor.data = self._host[key]
        torch.cuda.empty_cache()
        self.away = True

    def reload(self) -> None:
        """Back to the device; nothing if it is there."""
        if not self.away:
            return
        self.engine.reload_states()
        for key, tensor in self._optimizer_tensors():
            tensor.data = self._host[key].to(self.device)
        self.away = False

    def _optimizer_tensors(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        zero = self.engine.optimizer
        for index, master in enumerate(zero.fp32_partitioned_groups_flat):
            yield (index, "master"), master
            for name in ("exp_avg", "exp_avg_sq"):  # absent before the first step
                if name in zero.optimizer.state.get(master, {}):
                    yield (index, name), zero.optimizer.state[master][name]
