"""What the engine samples, and with which logprobs: vLLM on CPU against plain torch."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import fields
from itertools import islice

import pytest
import torch

from rlhf_core.config.sampling import REFUSED_OPTIONS
from rlhf_core.engines.vllm_engine import EngineSettings, Sampling, VllmEngine
from rlhf_core.errors import ConfigError
from rlhf_core.seeds import rollout_seeds

START, EOS = 1, 2  # special tokens of the tiny model; only the second ends a response by itself
PROMPTS = [[5, 17, 900], [30_000], [8] * 20, [11, 12]]


@pytest.fixture
def favours(vllm, sync, base_state, reference):
    """Function: token -> a transformers model with the engine's new weights, version 1. The next token is this one with a
    probability of about 0.17, whatever came before."""

    def load(token):
        state = {name: tensor.clone() for name, tensor in base_state.items()}
        for name, tensor in state.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
        state["model.embed_tokens.weight"][:, 0] = 1.0
        state["model.embed_tokens.weight"][token, 0] = 1.75
        sync(vllm, state, 1)
        return reference(state)

    return load


def sampled(engine, sampling, version, prompts=PROMPTS, seed=0):
    """(prompt, tokens, logprobs, finish reason) of every sample."""
    seeds = [rollout_seeds(seed, 0, group, sampling.samples) for group in range(len(prompts))]
    return [
        (prompts[group.index], *sample)
        for group in engine.generate(prompts, sampling, version, seeds)
        for sample in zip(group.token_ids, group.logprobs, group.finish_reasons, strict=True)
    ]


@torch.no_grad()
def distribution(model, prompt, tokens, sampling, ends):
    """Logprobs [tokens, vocabulary] that each token was sampled from, -inf for what was left out."""
    logits_TV = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    logits_TV[: sampling.min_new_tokens, ends] = -math.inf
    logits_TV /= sampling.temperature
    for logits_V in logits_TV:
        probabilities = logits_V.softmax(-1)
        logits_V[probabilities < sampling.min_p * probabilities.max()] = -math.inf
        if sampling.top_k:
            logits_V[logits_V < logits_V.topk(sampling.top_k).values[-1]] = -math.inf
        ordered, order = logits_V.softmax(-1).sort()
        logits_V[order[(ordered.cumsum(-1) <= 1 - sampling.top_p) & (order != order[-1])]] = -math.inf
    return logits_TV.log_softmax(-1)


def test_what_was_interrupted_is_drawn_again_as_it_was(vllm, favours):
    favours(EOS)
    prompts = [[7 + n] * (1 + n % 5) for n in range(16)]
    sampling, seeds = Sampling(3, 24, 1.0), [rollout_seeds(1, 0, group, 3) for group in range(16)]
    whole = {g.index: g for g in vllm.generate(prompts, sampling, 1, seeds)}
    for finished in (1, 4, 9):
        with closing(vllm.generate(prompts, sampling, 1, seeds)) as groups:
            kept = {g.index: g for g in islice(groups, finished)}
        missing = [n for n in range(16) if n not in kept]
        again = vllm.generate([prompts[n] for n in missing], sampling, 1, [seeds[n] for n in missing])
        kept |= {missing[g.index]: g for g in again}
        assert {n: g.token_ids for n, g in kept.items()} == {n: g.token_ids for n, g in whole.items()}
        for n, group in kept.items():
            for mine, theirs in zip(group.logprobs, whole[n].logprobs, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)


SHAPES = [
    {"top_k": 5},
    {"top_p": 0.4},
    {"min_p": 0.3},
    {"min_new_tokens": 6},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.01, "min_new_tokens": 3, "temperature": 0.8},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "+".join(shape))
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(vllm, favours, shape):
    model = favours(EOS)
    sampling = Sampling(**{"samples": 6, "max_new_tokens": 10, "temperature": 1.0, **shape})
    for prompt, tokens, logprobs, _ in sampled(vllm, sampling, 1):
        assert len(tokens) >= sampling.min_new_tokens
        table = distribution(model, prompt, tokens, sampling, [EOS])
        expected = table.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected, rtol=0, atol=2e-4)


def test_tokens_come_as_often_as_they_are_probable(vllm):
    sampling = Sampling(samples=400, max_new_tokens=1, temperature=1.0, top_k=3)
    found = sampled(vllm, sampling, 0, [[7]])
    probabilities = {tokens[0]: math.exp(logprobs[0]) for _, tokens, logprobs, _ in found}
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    counts = {token: sum(tokens[0] == token for _, tokens, _, _ in found) for token in probabilities}
    chi_square = sum((counts[t] - 400 * p) ** 2 / (400 * p) for t, p in probabilities.items())
    assert chi_square < 13.8  # two degrees of freedom: one seed in a thousand is above


def test_a_stop_token_ends_a_response_and_stays(vllm, favours):
    favours(START)
    found = sampled(vllm, Sampling(4, 8, 1.0, stop_token_ids=(START,)), 1)
    assert {reason for *_, reason in found} == {"stop", "length"}
    for _, tokens, logprobs, reason in found:
        assert len(tokens) == len(logprobs)
        assert START not in tokens[:-1]
        assert (tokens[-1] == START) is (reason == "stop")
    late = sampled(vllm, Sampling(4, 8, 1.0, min_new_tokens=4, stop_token_ids=(START,)), 1)
    assert all(START not in tokens[:4] for _, tokens, _, _ in late)


def test_an_option_that_vllm_does_not_have_is_named_before_anything_loads(tmp_path):
    settings = EngineSettings(str(tmp_path), "float32", 128, 8, options={"block_size": 16, "enforce_eagr": True})
    with pytest.raises(ConfigError, match=r"generate.engine.enforce_eagr = True: .*did you mean 'enforce_eager'\?"):
        VllmEngine(settings)


def test_the_model_s_end_tokens_end_a_response_wherever_they_are_named(vllm, favours, monkeypatch):
    assert vllm.end_ids == (EOS,)
    favours(START)
    monkeypatch.setattr(vllm, "end_ids", (START,))  # as config.json alone may name it
    assert {tuple(t) for _, t, *_ in sampled(vllm, Sampling(1, 8, 0.0), 1)} == {(START,)}


@pytest.mark.parametrize("text", ["b", "<|im_start|>"])
def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(vllm, favours, text):
    favours(START)
    tokenizer = vllm.llm.get_tokenizer()
    free = {(tuple(p), n): t for n, (p, t, *_) in enumerate(sampled(vllm, Sampling(4, 8, 1.0), 1))}
    found = sampled(vllm, Sampling(4, 8, 1.0, stop=(text, "never this")), 1)
    assert {reason for *_, reason in found} == {"stop", "length"}
    for prompt, tokens, logprobs, reason in found:
        assert len(tokens) == len(logprobs)
        assert (text in tokenizer.decode(tokens)) is (reason == "stop")
        assert text not in tokenizer.decode(tokens[:-1])
        assert any(whole[: len(tokens)] == tokens for (p, _), whole in free.items() if p == tuple(prompt))


def test_greedy_responses_stop_too(vllm, favours):
    favours(START)
    for stop in ({"stop": ("<|im_start|>",)}, {"stop_token_ids": (START,)}):
        assert {tuple(t) for _, t, *_ in sampled(vllm, Sampling(1, 8, 0.0, **stop), 1)} == {(START,)}


def test_the_model_folders_own_sampling_does_not_count(vllm, monkeypatch):
    # As from a generation_config.json; only its end tokens count.
    folder = {
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.01,
        "min_p": 0.9,
        "repetition_penalty": 9.0,
        "max_new_tokens": 2,
    }
    before = sampled(vllm, Sampling(4, 6, 1.0), 0)
    processor = vllm.llm.llm_engine.input_processor
    monkeypatch.setattr(processor, "generation_config_fields", processor.generation_config_fields | folder)
    assert [found[1] for found in sampled(vllm, Sampling(4, 6, 1.0), 0)] == [found[1] for found in before]


def test_refused_options_are_options():
    from vllm.engine.arg_utils import EngineArgs

    assert set(REFUSED_OPTIONS) <= {field.name for field in fields(EngineArgs)}
