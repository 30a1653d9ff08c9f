"""Buckets bring back what went in; digests notice whatever changed and nothing else."""

import itertools
import random

import pytest
import torch

from rlhf_core.engines import weights
from rlhf_core.engines.weights import ALIGNMENT, WeightsDigest, pack, plan_buckets, tensor_checksum, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]

#: Digests are written in manifests: another way to compute them could not verify the replay of stored runs.
KNOWN = "ba4677f7b5a891e9ebd506e165c2b815bd92341626cf4a8338e0f37cde1c0ac4"


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_tensor(generator, dtype, shape):
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def random_parameters(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [(), (1,), (3,), (7, 5), (2, 3, 5), (64,), (33, 2), (0,), (4, 0)]
    return {
        f"layer.{i}.weight": random_tensor(generator, rng.choice(DTYPES), rng.choice(shapes))
        for i in range(rng.randint(1, 12))
    }


def layout_of(tensors):
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


@pytest.mark.parametrize("max_bytes", [1, 100, 64, 300, 1 << 20])
@pytest.mark.parametrize("seed", range(12))
def test_buckets_bring_back_every_parameter(seed, max_bytes):
    tensors = random_parameters(seed)
    specs = plan_buckets(layout_of(tensors), max_bytes)
    assert [entry.name for spec in specs for entry in spec.entries] == list(tensors)
    assert [spec.index for spec in specs] == list(range(len(specs)))
    out = torch.full((max(spec.bytes for spec in specs),), 0xAB, dtype=torch.uint8)  # one buffer for all, never cleared
    for spec in specs:
        assert spec.bytes <= max(max_bytes + ALIGNMENT - 1, -(-spec.entries[0].bytes // ALIGNMENT) * ALIGNMENT)
        flat = pack(spec, tensors, out)
        assert flat.shape == (spec.bytes,)
        for name, tensor in unpack(spec, flat.clone()):
            assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
            assert bits(tensor) == bits(tensors[name])


@pytest.mark.parametrize("seed", range(12))
def test_buckets_are_as_full_as_the_order_allows_and_entries_never_overlap(seed):
    specs = plan_buckets(layout_of(random_parameters(seed)), 300)
    for spec in specs:
        ends = [entry.offset + entry.bytes for entry in spec.entries]
        assert all(entry.offset % ALIGNMENT == 0 for entry in spec.entries)
        assert all(end <= entry.offset for end, entry in zip(ends, spec.entries[1:], strict=False))
        assert ends[-1] <= (spec.bytes if len(spec.entries) == 1 else 300)
    for spec, following in itertools.pairwise(specs):
        assert spec.bytes + following.entries[0].bytes > 300


def test_a_parameter_above_the_limit_gets_a_bucket_of_its_own():
    specs = plan_buckets([("a", torch.int8, (8,)), ("b", torch.float32, (100,)), ("c", torch.int8, (8,))], 128)
    assert [[entry.name for entry in spec.entries] for spec in specs] == [["a"], ["b"], ["c"]]
    assert plan_buckets([], 128) == []


def test_pack_takes_views_that_are_not_contiguous():
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    (spec,) = plan_buckets([("w", tensor.dtype, tuple(tensor.shape))], 1024)
    ((_, back),) = unpack(spec, pack(spec, {"w": tensor}, torch.zeros(spec.bytes, dtype=torch.uint8)))
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("count", [1, 3, 8, 13, 24])
def test_every_bit_flip_changes_the_checksum(count):
    raw = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    seen = {tensor_checksum(raw)}
    for byte, bit in itertools.product(range(count), range(8)):
        flipped = raw.clone()
        flipped[byte] ^= 1 << bit
        seen.add(tensor_checksum(flipped))
    assert len(seen) == 1 + 8 * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_swapped_elements_change_the_checksum(dtype):
    tensor = torch.randn(24, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {tensor_checksum(tensor)}
    for i, j in itertools.combinations(range(24), 2):
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        seen.add(tensor_checksum(swapped))
    assert len(seen) == 1 + 24 * 23 // 2
    assert tensor_checksum(tensor.flip(0)) not in seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_pair_of_bit_flips_changes_the_checksum(dtype):
    # Two flips at the top of two words are the hardest case for a sum of products modulo a power of two.
    raw = torch.randn(8, generator=torch.Generator().manual_seed(1)).to(dtype).view(torch.uint8)
    seen, flips = {tensor_checksum(raw)}, list(itertools.product(range(raw.numel()), range(8)))
    pairs = [(a, b) for a, b in itertools.combinations(flips, 2) if dtype != torch.float64 or a[1] == b[1] == 7]
    for (i, bit_i), (j, bit_j) in pairs:
        flipped = raw.clone()
        flipped[i] ^= 1 << bit_i
        flipped[j] ^= 1 << bit_j
        seen.add(tensor_checksum(flipped))
    assert len(seen) == 1 + len(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_changed_signs_change_the_checksum(dtype):
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(dtype)
    seen = {tensor_checksum(tensor), tensor_checksum(-tensor)}
    for step, start in [(2, 0), (2, 1), (4, 3), (8, 7), (16, 15)]:
        changed = tensor.clone()
        changed[start::step] *= -1
        seen.add(tensor_checksum(changed))
    assert len(seen) == 7


@pytest.mark.parametrize("block", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [0, 1, 5, 64, 129])
def test_the_checksum_does_not_depend_on_how_it_is_cut(count, block, monkeypatch):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count))
    whole = tensor_checksum(tensor)
    monkeypatch.setattr(weights, "_BLOCK", block)
    assert tensor_checksum(tensor) == whole
    assert 0 <= whole < 2**64


def test_the_checksum_sees_content_not_memory():
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone()) == tensor_checksum(torch.nn.Parameter(tensor))
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())
    wide = torch.zeros(6, 20)
    wide[:, 5:15] = tensor
    assert tensor_checksum(wide[:, 5:15]) == tensor_checksum(tensor)
    zeros = torch.zeros(3)
    assert tensor_checksum(zeros) != tensor_checksum(-zeros), "bits count, not values"
    nan = torch.full((3,), torch.nan)
    assert tensor_checksum(nan) == tensor_checksum(nan.clone())


def digest_of(items):
    digest = WeightsDigest()
    for name, tensor in items:
        digest.add(name, tensor)
    return digest.hexdigest()


def test_the_digest_does_not_depend_on_order_or_buckets():
    tensors = random_parameters(3)
    expected = digest_of(tensors.items())
    for seed in range(5):
        items = list(tensors.items())
        random.Random(seed).shuffle(items)
        assert digest_of(items) == expected
    for max_bytes in (1, 200, 1 << 20):
        specs = plan_buckets(layout_of(tensors), max_bytes)
        out = torch.zeros(max(spec.bytes for spec in specs), dtype=torch.uint8)
        assert digest_of(item for spec in specs for item in unpack(spec, pack(spec, tensors, out))) == expected


def test_the_digest_names_name_dtype_shape_and_content():
    base = torch.arange(6, dtype=torch.float32)
    variants = [
        [("w", base)],
        [("v", base)],
        [("w", base.view(2, 3))],
        [("w", base.view(3, 2))],
        [("w", base.view(torch.int32))],  # the same bits
        [("w", base + 1)],
        [("w", base), ("v", base)],
        [("w", torch.cat([base, torch.zeros(1)]))],
        [],
    ]
    digests = {digest_of(variant) for variant in variants}
    assert len(digests) == len(variants)
    assert all(len(digest) == 64 for digest in digests)


def test_a_parameter_may_come_twice_only_with_the_same_content():
    digest = WeightsDigest()
    digest.add("w", torch.ones(3))
    once = digest.hexdigest()
    digest.add("w", torch.ones(3))
    assert digest.hexdigest() == once
    with pytest.raises(ValueError, match="'w' was added twice with different content"):
        digest.add("w", torch.zeros(3))


def test_known_digests_stay_what_they_are():
    tensor = torch.arange(1000, dtype=torch.float32).view(10, 100)
    assert digest_of([("w", tensor), ("b", tensor[0].bfloat16())]) == KNOWN
