"""Every response of a run has a random stream of its own."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.seeds import draw_seeds, evaluation_seeds, rollout_seeds


@pytest.mark.parametrize("seed", [0, 1, 4500, 4501, 2**31 - 1])
@pytest.mark.parametrize(("groups", "samples"), [(16, 8), (128, 64)])
def test_streams_are_distinct(seed, groups, samples):
    streams = [
        stream
        for iteration in range(3)
        for group in range(groups)
        for stream in rollout_seeds(seed, iteration, group, samples)
    ]
    streams += [
        s for version in range(3) for row in range(groups) for s in evaluation_seeds(seed, version, f"p{row}", 4)
    ]
    assert len(set(streams)) == len(streams)
    assert all(0 <= stream < 2**63 for stream in streams)
    assert max(streams) > 2**62


def test_runs_with_neighbouring_seeds_share_nothing():
    streams = [s for seed in range(200) for group in range(16) for s in rollout_seeds(seed, 0, group, 8)]
    assert len(set(streams)) == len(streams)


def test_a_stream_depends_on_its_own_name_only():
    assert rollout_seeds(3, 5, 7, 8)[:2] == rollout_seeds(3, 5, 7, 2)
    assert rollout_seeds(1, 11, 1, 1) != rollout_seeds(11, 1, 1, 1)
    assert evaluation_seeds(3, 5, "7", 1) != rollout_seeds(3, 5, 7, 1)


def test_streams_stay_what_they_are():
    # Segments of an unfinished generation are taken over by name: another naming needs another SCHEME.
    assert rollout_seeds(0, 0, 0, 2) == [1_408_989_128_384_925_626, 3_413_311_098_028_401_317]
    assert evaluation_seeds(0, 0, "p", 1) == [9_187_957_350_235_010_734]


def splitmix64(stream, position):
    """The same in Python's integers."""
    mask = 2**64 - 1
    z = (stream + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_draws_are_named_by_stream_and_position():
    names = [(stream, position) for stream in rollout_seeds(0, 0, 0, 64) for position in range(256)]
    streams, positions = (np.asarray(column) for column in zip(*names, strict=True))
    seeds = draw_seeds(streams, positions.astype(np.int32))
    assert seeds.dtype == np.int64
    assert seeds.view(np.uint64).tolist() == [splitmix64(*name) for name in names]
    assert len(set(seeds.tolist())) == len(names)
