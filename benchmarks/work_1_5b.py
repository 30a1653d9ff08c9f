"""Make the 1.5 B work: a Qwen2-shaped model with random weights, and prompts of exactly 128 tokens.

    python benchmarks/work_1_5b.py FOLDER [--tiny]

Writes FOLDER/model (plain Hugging Face folder), FOLDER/prompts.jsonl and FOLDER/run.toml. The shape is that of Qwen2 1.5 B
(28 layers of 1536, feed-forward 8960, 12 heads, 2 key-value heads, vocabulary 151,936, tied), the weights are random, so
responses run to their limit and every system does the same amount of work: 64 prompts x 8 samples, 128 + 512 tokens.
``--tiny`` makes a model that runs on a laptop, to try the scripts out.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

VOCABULARY, PROMPT_TOKENS, PROMPTS = 151_936, 128, 512
SHAPE = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}

REWARD = '''"""A reward without meaning, but with variance: the parity of the text's digest."""

import zlib


def parity(*, prompts, completions, answers, metadata):
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
'''

RUN = """iterations = {iterations}

[model]
source = "{folder}/model"

[prompts]
source = "{folder}/prompts.jsonl"
heldout = 0
max_prompt_tokens = 128

[generate]
prompts_per_iteration = {prompts}
samples_per_prompt = 8
max_new_tokens = {new_tokens}

[algorithm]
importance_cap = 2.0

[optim]
learning_rate = 1e-6
tokens_per_microbatch = {microbatch}
gradient_checkpointing = {checkpointing}

[sync]
bucket_mib = 512

[checkpoint]
every = 0

[resources]
device = "{device}"
engine_memory_fraction = 0.4

[tracking]
tensorboard = false

[[reward.functions]]
function = "{folder}/reward.py:parity"
"""


def make_model(folder: Path, tiny: bool) -> None:
    """Random weights (seed 0) and SmolLM2's tokenizer, padded with unreachable entries to the model's vocabulary."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhf_core.testing.tiny_model import tiny_tokenizer_folder

    shape = TINY if tiny else SHAPE
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        num_key_value_heads=2,
        **shape,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = tiny_tokenizer_folder(folder.parent / "cache")
    for source in tokenizer.iterdir():
        if source.name not in {"tokenizer.json", "config.json", "generation_config.json"} and source.is_file():
            (folder / source.name).write_bytes(source.read_bytes())
    content = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    used = max([*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])]) + 1
    content["model"]["vocab"] |= {f"~{token}": token for token in range(used, VOCABULARY)}
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def make_prompts(folder: Path) -> None:
    """Prompts that have exactly 128 tokens inside the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    vocabulary = json.loads((folder / "model" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = [w[1:] for w in vocabulary if w.startswith("Ġ") and len(w) > 4 and w[1:].isascii() and w[1:].isalpha()]
    words = sorted(w for w in words if w.islower())
    draw, rows = random.Random(0), []

    def length(text: str) -> int:
        chat = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    count = PROMPT_TOKENS - (length("the the") - 2)
    while len(rows) < PROMPTS:
        text = " ".join(draw.sample(words, count))
        if length(text) == PROMPT_TOKENS:
            rows.append({"prompt": text})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--microbatch", type=int, default=10_240, help="padded tokens of a forward pass")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    (folder / "model").mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", arguments.tiny)
    make_prompts(folder)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    text = RUN.format(
        folder=folder,
        iterations=arguments.iterations,
        prompts=4 if arguments.tiny else 64,
        new_tokens=16 if arguments.tiny else 512,
        microbatch=arguments.microbatch,
        checkpointing=str(not arguments.no_checkpointing).lower(),
        device="cpu" if arguments.tiny else "gpu",
    )
    (folder / "run.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
