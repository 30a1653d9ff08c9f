"""The inference engine for real: vLLM on CPU in this process, against plain transformers with the same weights."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_core.engines.vllm_engine import EngineSettings, Sampling, engine_environment, to_vllm_args
from rlhf_core.engines.weights import BucketSpec, WeightsDigest, pack, plan_buckets
from rlhf_core.errors import IntegrityError, StaleEngine
from rlhf_core.seeds import rollout_seeds

EOS = 2
CONTEXT = 128  # of the session's engine
GREEDY = Sampling(samples=1, max_new_tokens=8, temperature=0.0)


def random_prompts(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 40_000) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def altered(state, seed, scale=0.05):
    """Other weights for every parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def stops_often(state, token=EOS):
    """Weights whose next token is the end with a probability of about 0.17, whatever came before; or another token.

    Every token has the same large first coordinate, the layers add nothing, and the token's embedding is larger.
    """
    state = {name: tensor.clone() for name, tensor in state.items()}
    for name, tensor in state.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    embeddings = state["model.embed_tokens.weight"]
    embeddings[:, 0] = 1.0
    embeddings[token, 0] = 1.75
    return state


def streams(prompts, samples, seed=0):
    """A stream for each sample of each prompt."""
    return [rollout_seeds(seed, 0, group, samples) for group in range(len(prompts))]


def agree(engine, model, sequence_logprobs, seed=5):
    """Largest difference of logprobs between the engine and a transformers model over a few sequences."""
    sequences = random_prompts(4, seed)
    answers = engine.sequence_logprobs(sequences, engine.version)
    pairs = zip(answers, sequences, strict=True)
    return max(float((torch.from_numpy(a) - sequence_logprobs(model, s)).abs().max()) for a, s in pairs if len(s) > 1)


@torch.no_grad()
def greedy(model, prompt):
    """The greedy response of a transformers model, token by token without a cache."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_new_tokens):
        tokens.append(int(model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


# Generation


def test_every_prompt_comes_back_once_with_all_its_samples(vllm, sync, base_state, reference, sequence_logprobs):
    state = stops_often(base_state)
    sync(vllm, state, 1)
    prompts, sampling = random_prompts(12), Sampling(samples=3, max_new_tokens=8, temperature=0.9)
    groups = list(vllm.generate(prompts, sampling, 1, streams(prompts, 3)))
    assert sorted(group.index for group in groups) == list(range(12))
    model = reference(state)
    reasons = []
    for group in groups:
        assert len(group.token_ids) == len(group.logprobs) == len(group.finish_reasons) == 3
        assert group.seconds > 0
        prompt = prompts[group.index]
        for tokens, logprobs, reason in zip(group.token_ids, group.logprobs, group.finish_reasons, strict=True):
            reasons.append(reason)
            assert len(tokens) == len(logprobs)
            assert 1 <= len(tokens) <= 8
            assert (tokens[-1] == EOS) is (reason == "stop")
            assert EOS not in tokens[:-1]
            assert reason == "stop" or len(tokens) == 8
            expected = sequence_logprobs(model, prompt + tokens, 0.9)[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)
    assert set(reasons) == {"stop", "length"}
    # With 8 sequences at once and 36 to run, short groups overtake long ones.
    assert [group.index for group in groups] != list(range(12))


def test_greedy_is_the_greedy_of_transformers(vllm, reference):
    prompts, model = random_prompts(4, seed=1), reference()
    for group in vllm.generate(prompts, GREEDY, version=0):
        assert group.token_ids == [greedy(model, prompts[group.index])]


def test_a_response_depends_on_its_stream_alone(vllm):
    prompts, sampling = random_prompts(5, seed=2), Sampling(samples=4, max_new_tokens=10, temperature=1.0)
    seeds, others = streams(prompts, 4), streams(prompts, 4, seed=1)

    def run(chosen, seeds, samples=4):
        asked = [prompts[n] for n in chosen]
        groups = vllm.generate(asked, replace(sampling, samples=samples), 0, [seeds[n][:samples] for n in chosen])
        return {(chosen[g.index], s): (g.token_ids[s], g.logprobs[s]) for g in groups for s in range(samples)}

    vllm.llm.reset_prefix_cache()
    first = run(range(5), seeds)
    assert len({tuple(tokens) for tokens, _ in first.values()}) == 20, "samples differ"
    # Again; others in the batch, in another order; fewer samples; alone.
    for again in (run(range(5), seeds), run([4, 2], seeds), run([3], seeds, samples=1)):
        for name, (tokens, logprobs) in again.items():
            assert tokens == first[name][0]
            np.testing.assert_allclose(logprobs, first[name][1], rtol=0, atol=1e-5)
    other = run(range(5), others)
    assert all(other[name][0] != first[name][0] for name in first)


def test_long_prompts_keep_their_streams(vllm, monkeypatch):
    # Prompts that are read in several steps: what is drawn at the end of a part is thrown away.
    prompts, sampling = [[7 + n] * 100 for n in range(3)], Sampling(samples=2, max_new_tokens=6, temperature=1.0)

    def run():
        groups = vllm.generate(prompts, sampling, 0, streams(prompts, 2), apart=True)
        return {group.index: group.token_ids for group in groups}

    whole = run()
    scheduler = vllm.llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 40)
    assert run() == whole


def test_a_response_that_loses_its_place_goes_on_in_its_stream(vllm, sync, base_state):
    # As when the cache is full: what ran is thrown out and computed again, then goes on.
    prompts, sampling = random_prompts(8), Sampling(samples=1, max_new_tokens=20, temperature=1.0)

    def run(between=lambda: None):
        found = {}
        for group in vllm.generate(prompts, sampling, 1, streams(prompts, 1)):
            found[group.index] = group.token_ids[0]
            between()
        return found

    sync(vllm, stops_often(base_state), 1)
    whole = run()
    thrown_out = []
    assert run(lambda: thrown_out.append(vllm.llm.reset_prefix_cache(reset_running_requests=True))) == whole
    assert all(thrown_out)


def test_logprobs_can_be_left_out(vllm):
    (group,) = vllm.generate([[5, 6]], Sampling(2, 4, 1.0, logprobs=False), version=0)
    assert group.logprobs == []
    assert [len(tokens) for tokens in group.token_ids] == [4, 4]
    assert list(vllm.generate([], GREEDY, version=0)) == []


def test_closing_the_generator_ends_its_requests(vllm):
    engine = vllm.llm.llm_engine
    groups = vllm.generate(random_prompts(10), Sampling(3, 10, 1.0), version=0)
    next(groups)
    assert engine.has_unfinished_requests()
    groups.close()
    assert not engine.has_unfinished_requests()
    assert [group.index for group in vllm.generate([[3], [4]], GREEDY, version=0)] in ([0, 1], [1, 0])


def test_a_refused_prompt_leaves_nothing_behind(vllm):
    from vllm.exceptions import VLLMValidationError

    prompts = [[1, 2, 3], [5] * (CONTEXT + 1), [4]]
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        list(vllm.generate(prompts, GREEDY, version=0))
    assert not vllm.llm.llm_engine.has_unfinished_requests()
    assert [group.index for group in vllm.generate([[3]], GREEDY, version=0)] == [0]


def test_a_response_ends_with_the_context(vllm):
    (group,) = vllm.generate([[7] * (CONTEXT - 3)], Sampling(1, 50, 1.0), version=0)
    assert (len(group.token_ids[0]), group.finish_reasons) == (3, ["length"])


# Logprobs of given sequences


def test_sequence_logprobs_are_those_of_transformers(vllm, reference, sequence_logprobs):
    model = reference()
    sequences = [*random_prompts(6, seed=3), [9], [9, 9], [11] * (CONTEXT - 1)]
    for _ in range(2):  # the second time the prefix cache holds the prompts
        answers = vllm.sequence_logprobs(sequences, version=0)
        assert [len(answer) for answer in answers] == [len(sequence) - 1 for sequence in sequences]
        assert {answer.dtype for answer in answers} == {np.dtype(np.float32)}
        for answer, sequence in zip(answers, sequences, strict=True):
            torch.testing.assert_close(torch.from_numpy(answer), sequence_logprobs(model, sequence), rtol=0, atol=1e-4)
    assert vllm.sequence_logprobs([], version=0) == []


# Versions


def test_another_version_is_refused(vllm):
    for version in (1, -1):
        with pytest.raises(StaleEngine, match=f"serves policy version 0, not {version}"):
            list(vllm.generate([[3]], GREEDY, version=version))
        with pytest.raises(StaleEngine):
            vllm.sequence_logprobs([[3, 4]], version=version)


def test_nothing_is_served_during_an_update(vllm, sync, base_state):
    vllm.begin_update()
    for version in (0, 1):
        with pytest.raises(StaleEngine, match="serves policy version None"):
            next(vllm.generate([[3]], GREEDY, version=version))
        with pytest.raises(StaleEngine):
            vllm.sequence_logprobs([[3, 4]], version=version)
    with pytest.raises(IntegrityError, match="without a single bucket"):
        vllm.finish_update(1, "nothing")
    assert vllm.version is None
    sync(vllm, base_state, 1)
    assert vllm.version == 1


def test_a_group_never_mixes_versions(vllm, sync, base_state):
    with closing(vllm.generate(random_prompts(10), Sampling(2, 20, 1.0), version=0)) as groups:
        next(groups)
        vllm.begin_update()
        with pytest.raises(StaleEngine):
            list(groups)
    assert not vllm.llm.llm_engine.has_unfinished_requests()
    sync(vllm, altered(base_state, 1), 1)
    assert list(vllm.generate([[3]], GREEDY, version=1))


def test_an_update_does_not_finish_under_running_requests(vllm, sync, base_state):
    sync(vllm, stops_often(base_state), 1)
    with closing(vllm.generate(random_prompts(10), Sampling(2, 60, 1.0), 1, streams(range(10), 2))) as groups:
        next(groups)  # samples of other groups are longer: they are in the middle
        with pytest.raises(IntegrityError, match="still runs requests"):
            sync(vllm, base_state, 2)
    assert vllm.version is None
    sync(vllm, base_state, 2)
    assert vllm.version == 2


# Weight updates


@pytest.mark.parametrize("max_bytes", [1 << 30, 200_000, 1], ids=["one bucket", "middle", "one a parameter"])
def test_new_weights_are_served(vllm, sync, base_state, reference, sequence_logprobs, max_bytes):
    # 200,000 bytes put q, k and v of a layer, and gate and up, into different buckets: vLLM fuses them into one matrix.
    # The sender reuses one buffer for all buckets.
    old, state = reference(), altered(base_state, 11)
    assert agree(vllm, old, sequence_logprobs) < 1e-4
    digest = sync(vllm, state, 7, max_bytes)
    assert (vllm.version, len(digest)) == (7, 64)
    assert agree(vllm, reference(state), sequence_logprobs) < 1e-4
    assert agree(vllm, old, sequence_logprobs) > 0.1


def test_buckets_split_fused_layers(base_state):
    specs = plan_buckets([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in base_state.items()], 200_000)
    bucket = {entry.name.removeprefix("model.layers.0."): spec.index for spec in specs for entry in spec.entries}
    assert len({bucket[f"self_attn.{part}_proj.weight"] for part in "qkv"}) > 1
    assert len({bucket[f"mlp.{part}_proj.weight"] for part in ("gate", "up")}) > 1


@pytest.mark.parametrize(
    "parts",
    [
        "embed_tokens",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "layernorm",
        "model.norm",
    ],
)
def test_every_kind_of_parameter_arrives(vllm, sync, base_state, reference, sequence_logprobs, parts):
    # One by one, because with all of them new a single one that stays old hides in the difference.
    changed = altered(base_state, 13, scale=0.1)
    state = {name: changed[name] if parts in name else tensor for name, tensor in base_state.items()}
    assert any(parts in name for name in state)
    sync(vllm, state, 2)
    assert agree(vllm, reference(state), sequence_logprobs) < 1e-5
    assert agree(vllm, reference(), sequence_logprobs) > 1e-3


def test_read_only_buckets_are_accepted(vllm, base_state, reference, sequence_logprobs):
    # Arrays that come out of Ray's object store cannot be written to.
    state, digest = altered(base_state, 17), WeightsDigest()
    for name, tensor in state.items():
        digest.add(name, tensor)
    vllm.begin_update()
    for spec in plan_buckets([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()], 1 << 22):
        array = pack(spec, state, torch.zeros(spec.bytes, dtype=torch.uint8)).numpy()
        array.flags.writeable = False
        vllm.load_bucket(spec, array)
    vllm.finish_update(3, digest.hexdigest())
    assert agree(vllm, reference(state), sequence_logprobs) < 1e-4


def test_an_update_forgets_cached_prefixes(vllm, sync, base_state, reference):
    prompt = random_prompts(1, seed=9)[0] * 5
    state = altered(base_state, 19)
    (before,) = vllm.generate([prompt], GREEDY, version=0)
    sync(vllm, state, 1)
    (after,) = vllm.generate([prompt], GREEDY, version=1)
    assert before.token_ids != after.token_ids
    assert after.token_ids == [greedy(reference(state), prompt)]


def send(engine, state, spoil=lambda spec, flat: flat):
    """Send all buckets but those that ``spoil`` turns into None; returns the digest of what should have arrived."""
    digest = WeightsDigest()
    engine.begin_update()
    for name, tensor in state.items():
        digest.add(name, tensor)
    for spec in plan_buckets([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()], 200_000):
        flat = spoil(spec, pack(spec, state, torch.zeros(spec.bytes, dtype=torch.uint8)))
        if flat is not None:
            engine.load_bucket(spec, flat.numpy())
    return digest.hexdigest()


def flip_a_bit(spec: BucketSpec, flat):
    if spec.index == 2:
        flat[1000] ^= 4
    return flat


@pytest.mark.parametrize(
    "spoil",
    [flip_a_bit, lambda spec, flat: None if spec.index == 3 else flat, lambda spec, flat: flat * (spec.index != 4)],
    ids=["a flipped bit", "a lost bucket", "zeros"],
)
def test_weights_that_did_not_arrive_intact_are_not_served(vllm, sync, base_state, reference, sequence_logprobs, spoil):
    state = altered(base_state, 23)
    digest = send(vllm, state, spoil)
    with pytest.raises(
        IntegrityError, match=f"policy version 4 did not arrive intact: the trainer's digest is {digest}"
    ):
        vllm.finish_update(4, digest)
    for version in (0, 4):
        with pytest.raises(StaleEngine):
            next(vllm.generate([[3]], GREEDY, version=version))
    assert sync(vllm, state, 4) == digest, "a whole update makes up for a failed one"
    assert agree(vllm, reference(state), sequence_logprobs) < 1e-4


def test_an_update_that_was_cut_off_leaves_nothing_behind(vllm, sync, base_state, reference, sequence_logprobs):
    vllm.begin_update()
    cut, state = altered(base_state, 29), altered(base_state, 31)
    specs = plan_buckets([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in cut.items()], 200_000)
    for spec in specs[: len(specs) // 2]:
        vllm.load_bucket(spec, pack(spec, cut, torch.zeros(spec.bytes, dtype=torch.uint8)).numpy())
    sync(vllm, state, 6, 200_000)
    assert agree(vllm, reference(state), sequence_logprobs) < 1e-4


def test_a_wrong_digest_is_not_served(vllm, base_state):
    send(vllm, base_state)
    with pytest.raises(IntegrityError, match="did not arrive intact"):
        vllm.finish_update(0, "0" * 64)
    with pytest.raises(StaleEngine):
        vllm.require(0)


# Configuration


def test_user_options_win():
    settings = EngineSettings(
        "folder", "bfloat16", 64, 4, kv_cache_gib=0.5, options={"max_num_seqs": 9, "enforce_eager": False}
    )
    args = to_vllm_args(settings)
    assert (args["max_num_seqs"], args["enforce_eager"], args["max_model_len"]) == (9, False, 64)
    assert args["kv_cache_memory_bytes"] == 2**29
    assert args["logprobs_mode"] == "processed_logprobs"


def test_only_a_gpu_engine_sleeps():
    gpu = EngineSettings("folder", "bfloat16", 64, 4, device="cuda", sleep=True, memory_fraction=0.3, tensor_parallel=2)
    args = to_vllm_args(gpu)
    assert (args["enable_sleep_mode"], args["gpu_memory_utilization"]) == (True, 0.3)
    assert args["distributed_executor_backend"] == "ray"
    assert "enforce_eager" not in args
    assert "kv_cache_memory_bytes" not in args
    assert "enable_sleep_mode" not in to_vllm_args(EngineSettings("folder", "bfloat16", 64, 4, sleep=True))
    assert not any("CPU" in name for name in engine_environment(gpu))


def test_a_cpu_engine_does_not_sleep(vllm):
    vllm.sleep(discard_weights=True)
    assert vllm.version == 0
    vllm.wake()
    assert list(vllm.generate([[3]], GREEDY, version=0))
