"""What a random stream for each sample costs, and whether what is drawn again is what was drawn.

    python benchmarks/sampling.py MODEL [--device gpu] [--prompts 64] [--samples 8] [--prompt-tokens 128] [--new-tokens 512]

One engine in one process; three ways of sampling take turns, and each pair of neighbours is compared:

- prompts: a request for each prompt, without seeds, as plain vLLM would be asked;
- samples: a request for each sample, without seeds;
- streams: a request for each sample, each with its stream, as training asks.

`--vllm-generators` leaves vLLM's older model runner its generators, one for each request (VLLM_USE_V2_MODEL_RUNNER=0 asks for
that runner on a GPU). Then every other prompt is sampled again in a call of its own: `drawn_again` is the share of responses
that are the same, token for token. Every response runs to its limit unless `--may-end`. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.engines.vllm_engine import EngineSettings, Sampling, VllmEngine, sampling_params
from rlhf_core.engines.vllm_worker import PolicyReceiver
from rlhf_core.seeds import rollout_seeds

Prompts = Sequence[Sequence[int]]


def one_request_a_prompt(engine: VllmEngine, prompts: Prompts, sampling: Sampling) -> int:
    """Tokens sampled."""
    params = sampling_params(sampling, None)
    params.n = sampling.samples
    outputs = engine.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)


def one_request_a_sample(engine: VllmEngine, prompts: Prompts, sampling: Sampling, seeds: Any) -> int:
    """Tokens sampled."""
    groups = engine.generate(prompts, sampling, 0, seeds)
    return sum(len(tokens) for group in groups for tokens in group.token_ids)


def speeds(ways: dict[str, Callable[[], int]], forget: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each way, an entry a round. The order turns from round to round; a first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways) if number % 2 else list(ways)[::-1]
        for name in names:
            forget()
            started = time.monotonic()
            tokens = ways[name]()
            if number:
                found[name].append(tokens / (time.monotonic() - started))
    return found


def drawn_again(engine: VllmEngine, prompts: Prompts, sampling: Sampling, seeds: list[list[int]]) -> float:
    """Share of the responses to every other prompt that are the same in a call of their own."""
    whole = {group.index: group.token_ids for group in engine.generate(prompts, sampling, 0, seeds)}
    groups = engine.generate(prompts[::2], sampling, 0, seeds[::2])
    same = [mine == its for g in groups for mine, its in zip(g.token_ids, whole[2 * g.index], strict=True)]
    return sum(same) / len(same)


def main(args: argparse.Namespace) -> None:
    """Measure and print."""
    if args.vllm_generators:
        PolicyReceiver.rlhf_draw_by_position = lambda self: None
    settings = EngineSettings(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.new_tokens + 1,
        max_num_seqs=args.prompts * args.samples,
        device=args.device,
        memory_fraction=args.memory_fraction,
        kv_cache_gib=args.kv_cache_gib,
        options=json.loads(args.options),
    )
    engine = VllmEngine(settings)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, args.tokens) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
    least = 0 if args.may_end else args.new_tokens
    sampling = Sampling(args.samples, args.new_tokens, 1.0, min_new_tokens=least)
    seeds = [rollout_seeds(0, 0, group, args.samples) for group in range(args.prompts)]
    ways: dict[str, Callable[[], int]] = {
        "prompts": lambda: one_request_a_prompt(engine, prompts, sampling),
        "samples": lambda: one_request_a_sample(engine, prompts, sampling, None),
        "streams": lambda: one_request_a_sample(engine, prompts, sampling, seeds),
    }
    found = speeds(ways, engine.llm.reset_prefix_cache, args.rounds)
    compared = {
        f"{b} / {a}": round(statistics.median(y / x for x, y in zip(found[a], found[b], strict=True)), 4)
        for a, b in (("prompts", "samples"), ("samples", "streams"), ("prompts", "streams"))
    }
    report = {
        "newer_model_runner": bool(engine.llm.llm_engine.vllm_config.use_v2_model_runner),
        "tokens_per_second": {name: round(statistics.median(values)) for name, values in found.items()},
        "each_round": {name: [round(value) for value in values] for name, values in found.items()},
        "speed": compared,
        "drawn_again": drawn_again(engine, prompts, sampling, seeds),
    }
    engine.close()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="model folder")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40_000, help="prompts are of token ids 100 .. TOKENS")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory-fraction", type=float, default=0.6)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--options", default="{}", help="further arguments of vLLM, as a JSON object")
    parser.add_argument("--may-end", action="store_true", help="responses may end before the limit")
    parser.add_argument("--vllm-generators", action="store_true", help="leave vLLM's generators in place")
    main(parser.parse_args())
