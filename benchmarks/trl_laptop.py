"""TRL's GRPOTrainer beside the laptop preset on CPU: same model, prompts, samples, lengths; iterations taken in turn.

    pip install --no-deps trl==1.16.0
    python benchmarks/trl_laptop.py MODEL_FOLDER [--steps 4]

MODEL_FOLDER is the prepared SmolLM2 below RLHF_HOME/models. After each iteration of `rlhf train laptop` its driver is stopped,
TRL takes one step, and the driver goes on: a pair sees the same machine. TRL generates with transformers, because its vLLM
mode needs a GPU. Differences that TRL does not let one remove, all in its favour: AdamW works on the bf16 weights (here on
float32 masters), there are no separate old logprobs, no probe of the engine, and nothing is stored.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from laptop import settle, train

from rlhf_core.config.data import ArithmeticConfig
from rlhf_core.prompts.arithmetic import arithmetic_rows
from rlhf_core.rewards.rules import last_number

#: The preset's prompts, as in infra/presets/laptop.toml.
PROMPTS = ArithmeticConfig(low=1, high=9)


def reward(completions: list, answer: list[str], **_: Any) -> list[float]:
    """The preset's rule, as TRL calls it."""
    texts = [c[0]["content"] for c in completions]
    scored = last_number(prompts=[""] * len(texts), completions=texts, answers=answer, metadata=[{}] * len(texts))
    return [float(getattr(s, "value", s)) for s in scored]


def run_trl(model: str, steps: int, output: str) -> None:
    """The child: one step for each line on the standard input, its seconds on the standard output."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turns(TrainerCallback):
        """Waits for its turn before each step."""

        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            print("READY", flush=True)
            sys.stdin.readline()
            self.started = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            print("STEP", time.monotonic() - self.started, flush=True)

    rows = arithmetic_rows(PROMPTS, 0)
    prompts = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows]
    config = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        # 16 rows of about 68 tokens are the preset's micro-batch of 1024; 8 of them are the 128 rollouts of an iteration.
        per_device_train_batch_size=16,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=24,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        max_steps=steps,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Turns()],
    ).train()


class Trl:
    """The child process."""

    def __init__(self, model: str, steps: int, home: Path) -> None:
        command = [sys.executable, __file__, model, "--steps", str(steps), "--child", str(home / "trl")]
        log = (home / "trl.log").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=home
        )
        self.wait("READY")

    def wait(self, word: str) -> list[str]:
        """The words of the next line that starts with ``word``."""
        for line in self.process.stdout or ():
            if line.startswith(word):
                return line.split()
        raise RuntimeError(f"TRL ended with {self.process.wait()}: see trl.log")

    def step(self) -> float:
        """Seconds of one step."""
        print(file=self.process.stdin, flush=True)
        return float(self.wait("STEP")[1])


def main() -> None:
    """Train both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of the prepared model")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve())
    if arguments.child:
        return run_trl(model, arguments.steps, arguments.child)
    home = Path(tempfile.mkdtemp(prefix="rb-"))
    (home / "models").mkdir()
    (home / "models" / Path(model).name).symlink_to(model)
    trl = Trl(model, arguments.steps, home)
    ours, theirs, resumed = [], [], [0.0]

    def turn(iteration: int) -> None:
        ended = time.monotonic()
        if iteration:  # the first one's start is not seen, and it warms up
            ours.append(ended - resumed[-1])
        settle(home)
        theirs.append(trl.step())
        print(f"iteration {iteration}: ours {(ours or [float('nan')])[-1]:.2f} s, TRL {theirs[-1]:.2f} s", flush=True)
        resumed.append(time.monotonic())

    iterations = ["--set", f"iterations={arguments.steps}"]
    train(home, "ours", iterations, home / "train.log", (r"Task run 'iteration-0*(\d+)' - Finished", turn))
    trl.process.wait(60)
    ratios = [b / a for a, b in zip(ours, theirs[1:], strict=True)]
    print(f"seconds an iteration, medians without the first: ours {statistics.median(ours):.2f}", end=", ")
    print(f"TRL {statistics.median(theirs[1:]):.2f}; TRL / ours, median of {len(ratios)} pairs: ", end="")
    print(f"{statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
