"""Sections about where the run lives: machines and storage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config.base import LocalPath, Section


class ResourcesConfig(Section):
    """How many workers of each kind, and what each one gets."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`auto` takes GPUs where the Ray cluster has any."""
    trainer_ranks: int = Field(default=1, ge=1)
    """ZeRO-3 ranks."""
    engines: int = Field(default=1, ge=1)
    """vLLM engines."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""
    reward_workers: int = Field(default=1, ge=1)
    """Reward worker processes, spread over nodes."""
    colocate: bool = True
    """Trainer ranks and engines take turns on the same devices; `false` gives each its own."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank and engine; by default the cores of its share of the machine."""
    engine_memory_fraction: float = Field(default=0.4, gt=0, lt=1)
    """Share of a GPU's memory for the engine (weights and KV cache)."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of an engine on CPU in GiB."""


class StorageConfig(Section):
    """The object store that holds everything that is committed."""

    url: LocalPath = Field(default=".rlhf/store", min_length=1)
    """A local folder or `s3://bucket/prefix`; endpoint and credentials come from the environment (`AWS_*`)."""
    flush_seconds: float = Field(default=1.0, ge=0.05, le=60)
    """Finished groups are written as one segment after at most this long."""
    staging_mib: int = Field(default=1024, ge=16)
    """What an engine may keep on its local disk while the store does not take it, in MiB; then generation waits."""
    keep_rollouts_hours: float | None = Field(default=None, ge=0, le=1_000_000)
    """Delete rollouts, rewards and experience of iterations that ended longer ago, once no checkpoint that is kept among the
    newest needs them and no fork or rerun shares them; left out, they stay for ever."""
    export: LocalPath | None = None
    """Folder for the exported Hugging Face model; by default `.rlhf/exports/RUN`."""
