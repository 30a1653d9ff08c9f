"""TRL's GRPOTrainer on the same model, prompts, samples and lengths as the laptop preset, on CPU.

    pip install --no-deps trl==1.16.0
    python benchmarks/trl_laptop.py MODEL_FOLDER [--steps 4]

MODEL_FOLDER is the prepared SmolLM2 below RLHF_HOME/models. TRL generates with transformers here: its vLLM mode cannot load
new weights into vLLM's CPU backend. Prints seconds an iteration; compare with `benchmarks/laptop.py` on the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlhf_core.config.data import ArithmeticConfig
from rlhf_core.prompts.arithmetic import arithmetic_rows
from rlhf_core.rewards.rules import last_number


class StepTimes(TrainerCallback):
    """Seconds from one step's end to the next one's."""

    def __init__(self) -> None:
        self.ends = [time.monotonic()]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if len(self.ends) == 1:
            self.ends[0] = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())
        print(f"step {len(self.ends) - 1}: {self.ends[-1] - self.ends[-2]:.2f} s", flush=True)


def reward(completions: list, answer: list[str], **_: Any) -> list[float]:
    """The preset's rule, as TRL calls it."""
    texts = [c[0]["content"] for c in completions]
    scored = last_number(prompts=[""] * len(texts), completions=texts, answers=answer, metadata=[{}] * len(texts))
    return [float(getattr(s, "value", s)) for s in scored]


def main() -> None:
    """Train a few steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    rows = arithmetic_rows(ArithmeticConfig(), 0)
    prompts = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows]
    times = StepTimes()
    config = GRPOConfig(
        output_dir="trl-out",
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=24,
        learning_rate=2e-5,
        beta=0.0,
        temperature=1.0,
        max_steps=arguments.steps,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    GRPOTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[times],
    ).train()
    steps = [b - a for a, b in zip(times.ends, times.ends[1:], strict=False)]
    print(f"TRL seconds an iteration, median without the first: {statistics.median(steps[1:] or steps):.2f}")


if __name__ == "__main__":
    main()
