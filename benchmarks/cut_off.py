"""Whether a generation that is cut off favours short responses: lengths after seeded cut-offs, against nobody cutting anything.

    python benchmarks/cut_off.py MODEL [--device gpu] [--prompts 32] [--samples 8] [--new-tokens 256] [--cuts 12]

Each cut-off keeps the groups that had finished when half of them had, as the segments of a killed generation do, and samples the
others in a call of their own: `again` with their own streams, as training does, and `anew` with other streams, as it must not be
done. Printed are mean lengths of all responses (in tokens, with the standard error of the paired difference), and the share of the
drawn-again responses that are the same. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from rlhf_core.engines.vllm_engine import EngineSettings, FinishedGroup, Sampling, VllmEngine
from rlhf_core.seeds import rollout_seeds

#: What is asked for decides how long the answer is.
ASKED = (
    "Say hello.",
    "Name {n} colours.",
    "What is {n} plus 3?",
    "Tell me a story in {n} sentences.",
    "Explain rain to a child.",
)


def asked(model: str, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts with the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [ASKED[n % len(ASKED)].format(n=n // len(ASKED) + 2) for n in range(count)]
    render = tokenizer.apply_chat_template
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        tokenizer.encode(render(c, tokenize=False, add_generation_prompt=True), add_special_tokens=False) for c in chats
    ]


def mean_length(groups: Sequence[FinishedGroup]) -> float:
    """Tokens of a response, over all groups."""
    return statistics.fmean(len(tokens) for group in groups for tokens in group.token_ids)


class CutOff:
    """One engine that is cut off again and again."""

    def __init__(self, engine: VllmEngine, prompts: list[list[int]], sampling: Sampling) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling

    def draw(self, number: int, chosen: Sequence[int]) -> list[FinishedGroup]:
        """The chosen groups of iteration ``number``, in the order in which they finish; their indexes count the chosen."""
        seeds = [rollout_seeds(0, number, group, self.sampling.samples) for group in chosen]
        return list(self.engine.generate([self.prompts[group] for group in chosen], self.sampling, 0, seeds))

    def once(self, number: int) -> dict[str, float]:
        """Mean lengths of one iteration, whole and after a cut-off."""
        whole = self.draw(2 * number, range(len(self.prompts)))
        half = len(whole) // 2
        kept, lost = whole[:half], [group.index for group in whole[half:]]
        again, anew = self.draw(2 * number, lost), self.draw(2 * number + 1, lost)
        before = {group.index: group.token_ids for group in whole}
        pairs = [pair for g in again for pair in zip(g.token_ids, before[lost[g.index]], strict=True)]
        return {
            "whole": mean_length(whole),
            "again": mean_length([*kept, *again]),
            "anew": mean_length([*kept, *anew]),
            "same": sum(mine == its for mine, its in pairs) / len(pairs),
        }


def compared(rows: Sequence[dict[str, float]], name: str) -> tuple[float, float]:
    """Mean difference of ``name`` from ``whole``, and its standard error."""
    differences = [row[name] - row["whole"] for row in rows]
    return statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5


def main(args: argparse.Namespace) -> None:
    """Cut off, compare, print."""
    options: dict[str, Any] = json.loads(args.options)
    settings = EngineSettings(
        model=args.model, dtype=args.dtype, max_model_len=args.new_tokens + 128, max_num_seqs=args.prompts * args.samples,
        device=args.device, memory_fraction=args.memory_fraction, kv_cache_gib=args.kv_cache_gib, options=options,
    )  # fmt: skip
    engine = VllmEngine(settings)
    trial = CutOff(engine, asked(args.model, args.prompts), Sampling(args.samples, args.new_tokens, 1.0, logprobs=True))
    rows = [trial.once(number) for number in range(args.cuts)]
    report: dict[str, Any] = {"whole": round(statistics.fmean(row["whole"] for row in rows), 2)}
    for name in ("again", "anew"):
        difference, error = compared(rows, name)
        report[name] = {"difference": round(difference, 3), "standard_error": round(error, 3)}
    report["same"] = round(statistics.fmean(row["same"] for row in rows), 4)
    engine.close()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a chat model")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--cuts", type=int, default=12)
    parser.add_argument("--memory-fraction", type=float, default=0.3)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--options", default="{}", help="further arguments of vLLM, as a JSON object")
    main(parser.parse_args())
