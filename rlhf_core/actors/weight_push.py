"""How a trainer rank hands packed buckets to engines.

On one node with shared GPUs a bucket travels as a CUDA IPC handle: the engine maps the trainer's memory. Everywhere else it
travels through Ray's object store (shared memory on a node, a transfer between nodes), written once for all engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_core.engines.weights import BucketSpec

#: Two buckets are in flight: one is gathered while the other is loaded.
BUCKETS_IN_FLIGHT = 2


@dataclass
class EngineSink:
    """The engines that one rank serves; empty for ranks that only take part in the gathering."""

    engines: tuple[Any, ...] = ()
    transport: Literal["object_store", "cuda_ipc"] = "object_store"
    timeout_seconds: float = 600.0
    _pending: list[list[Any]] = field(default_factory=list)

    def send(self, epoch: int, spec: BucketSpec, flat: Tensor) -> None:
        """Hand over one bucket ``flat`` [spec.bytes] uint8. It may be overwritten after the next but one call."""
        if not self.engines:
            return
        self._pending.append([engine.load_bucket.remote(epoch, spec, self._payload(flat)) for engine in self.engines])
        while len(self._pending) >= BUCKETS_IN_FLIGHT:
            self._wait(self._pending.pop(0))

    def drain(self) -> None:
        """Wait until every engine has loaded what was sent."""
        while self._pending:
            self._wait(self._pending.pop(0))

    def _payload(self, flat: Tensor) -> Any:
        if self.transport == "cuda_ipc":
            import torch
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.current_stream().synchronize()  # the engine reads on another stream
            return reduce_tensor(flat)
        import ray

        return ray.put(flat.cpu().numpy())

    def _wait(self, calls: list[Any]) -> None:
        import ray

        ray.get(calls, timeout=self.timeout_seconds)
