"""Random streams: each sampled response has one, named by what the response is and by nothing else.

Which engine draws it, in whose company and at which attempt does not matter. A response that was lost is therefore drawn
again as it was, up to the last bits of its logprobs, and keeping the ones that had finished selects nothing.
"""

from __future__ import annotations

import json

import numpy as np
from blake3 import blake3

#: How streams are named and used. Another number means that the same names give other responses.
SCHEME = 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def rollout_seeds(seed: int, iteration: int, group: int, samples: int) -> list[int]:
    """The stream of each sample of a group in training, 63 bits each. ``seed`` is the run's."""
    return [_stream("rollout", seed, iteration, group, sample) for sample in range(samples)]


def evaluation_seeds(seed: int, version: int, prompt_id: str, samples: int) -> list[int]:
    """The stream of each sample of a held-out prompt at a policy version, 63 bits each. ``seed`` is the run's."""
    return [_stream("evaluation", seed, version, prompt_id, sample) for sample in range(samples)]


def _stream(*name: str | int) -> int:
    content = json.dumps([SCHEME, *name], separators=(",", ":"))
    return int.from_bytes(blake3(content.encode()).digest(8), "big") >> 1


def draw_seeds(streams_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """Seeds of single draws, int64 [N]: the token at this position of the sequence that has this stream (SplitMix64)."""
    with np.errstate(over="ignore"):
        mixed = streams_N.astype(np.uint64) + (positions_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
