"""Policy weights in motion: packed buckets and the digest that names a policy version.

A bucket is one flat byte tensor holding many parameters, so that a sync costs a handful of transfers instead of one call
a parameter. The digest of a policy is the same wherever it is computed (trainer or engine, CPU or GPU): it is made of
exact 64-bit integer arithmetic over the parameters' bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import blake3
import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Parameters start at multiples of this inside a bucket, so that views of every dtype are aligned.
ALIGNMENT = 64

#: Words hashed at once: bounds the temporary memory to about 16 MiB.
_BLOCK = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio in 64 bits, as a signed number; odd, hence invertible
_SHIFT, _SHIFTED = 29, (1 << 35) - 1
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


@dataclass(frozen=True)
class BucketEntry:
    """Where one parameter lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class BucketSpec:
    """Layout of one bucket."""

    index: int
    entries: tuple[BucketEntry, ...]
    bytes: int


def plan_buckets(parameters: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], max_bytes: int) -> list[BucketSpec]:
    """Cut parameters, in order, into buckets of at most ``max_bytes`` (a larger parameter gets a bucket of its own)."""
    specs: list[BucketSpec] = []
    entries: list[BucketEntry] = []
    offset = 0
    for name, dtype, shape in parameters:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if entries and offset + size > max_bytes:
            specs.append(BucketSpec(len(specs), tuple(entries), offset))
            entries, offset = [], 0
        entries.append(BucketEntry(name, str(dtype).removeprefix("torch."), tuple(shape), offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    if entries:
        specs.append(BucketSpec(len(specs), tuple(entries), offset))
    return specs


def pack(spec: BucketSpec, tensors: dict[str, Tensor], out: Tensor) -> Tensor:
    """Copy the parameters into ``out`` [>= spec.bytes] uint8; returns the used part. The gaps keep what they held."""
    for entry in spec.entries:
        view = out[entry.offset : entry.offset + entry.bytes].view(getattr(torch, entry.dtype))
        view.copy_(tensors[entry.name].reshape(-1))
    return out[: spec.bytes]


def unpack(spec: BucketSpec, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a bucket as views into ``flat`` [spec.bytes] uint8."""
    for entry in spec.entries:
        view = flat[entry.offset : entry.offset + entry.bytes].view(getattr(torch, entry.dtype))
        yield entry.name, view.view(entry.shape)


def tensor_checksum(tensor: Tensor) -> int:
    """64-bit checksum of a tensor's bits: the sum over scrambled words s_i of s_i * c_i modulo 2**64, c_i odd.

    Each word is scrambled before it is weighted, by steps that can be undone (an odd factor, a shift of itself onto itself), so
    that a change of any single word always changes the sum, and the top bits, which a product alone would leave where they
    are, reach all others; other corruptions, permutations included, go unnoticed with a probability of about 2**-64. Integer
    sums do not depend on the order of addition, hence the value is exact on every device. Words are 8 bytes; the tail is
    padded with zeros.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    tail = raw.numel() % 8
    if tail:
        raw = torch.nn.functional.pad(raw, (0, 8 - tail))
    words = raw.view(torch.int64)
    total = 0
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK]
        scrambled = block * _ODD
        scrambled ^= (scrambled >> _SHIFT) & _SHIFTED  # a logical shift: the arithmetic one could not be undone
        scrambled *= _coefficients(block.numel(), start, block.device)
        total = (total + int(scrambled.sum())) & 0xFFFFFFFFFFFFFFFF
    return total


def _coefficients(count: int, start: int, device: torch.device) -> Tensor:
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    index.mul_(_ODD).bitwise_xor_(index >> 29).mul_(_MIX)
    return index.bitwise_or_(1)


@dataclass
class WeightsDigest:
    """Collects the parameters of one policy version, in any order, into one digest."""

    checksums: dict[str, tuple[str, tuple[int, ...], int]] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole parameter. ValueError if the name was added before with other content."""
        entry = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor_checksum(tensor))
        if self.checksums.setdefault(name, entry) != entry:
            raise ValueError(f"parameter {name!r} was added twice with different content")

    def hexdigest(self) -> str:
        """blake3 over the sorted (name, dtype, shape, checksum) of every parameter."""
        rows = [[name, dtype, list(shape), value] for name, (dtype, shape, value) in sorted(self.checksums.items())]
        return blake3.blake3(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
