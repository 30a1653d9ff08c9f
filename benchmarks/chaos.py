"""Seeded kills and store faults against real runs, compared with an undisturbed one.

    python benchmarks/chaos.py OUT.json [--strikes 100] [--seed 0] [--iterations 10] [--strikes-a-run 12] [--only FAULT ...]
                               [--gpus N]

Every run ends by the documented command alone: `rlhf train` with the same words, given again whenever it fails or was killed.
Prints a line a run and a table by fault. Nothing else needs to be quiet meanwhile: nothing here is about time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

from chaos import Proof, chaos_world
from chaos_faults import DISK_FULL, FAULTS

#: A driver's death is the commonest fault and costs nothing to overcome: it comes more often.
WEIGHTS = {"driver": 4, "rank": 2, "engine": 2}


def schedule(seed: int, strikes: int, faults: Collection[str]) -> list[str]:
    """The faults in the order in which they strike."""
    chance, deck, order = random.Random(seed), [], []
    while len(order) < strikes:
        if not deck:
            deck = [fault for fault in faults for _ in range(WEIGHTS.get(fault, 1))]
            chance.shuffle(deck)
        order.append(deck.pop())
    return order


def verdict(calm: Proof, proof: Proof) -> list[str]:
    """What differs from the undisturbed run; empty if nothing does."""
    wrong = []
    if proof.weights != calm.weights:
        first = next(
            (k for k, pair in enumerate(zip(proof.weights, calm.weights, strict=False)) if len(set(pair)) > 1), -1
        )
        wrong.append(f"weights differ from iteration {first} on")
    if proof.prompts != calm.prompts:
        wrong.append("other prompts")
    if proof.rewards != calm.rewards:
        wrong.append("other rewards")
    return wrong + proof.regenerated


def main() -> None:
    """Strike, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--strikes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--strikes-a-run", type=int, default=12)
    parser.add_argument("--gpus", type=int, default=0, help="train on so many GPUs instead of the CPU")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    arguments = parser.parse_args()
    results = []
    struck: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    with chaos_world(arguments.iterations, arguments.gpus) as world:
        faults = [fault for fault in arguments.only if fault != DISK_FULL or world.disk_refused is None]
        if world.disk_refused is not None:
            print(f"no disk can be filled here: {world.disk_refused}")
        order = schedule(arguments.seed, arguments.strikes * 2, faults)
        world.train("calm")
        calm = Proof.of(world.store(), "calm")
        number = 0
        while sum(struck.values()) < arguments.strikes:
            number += 1
            part, order = order[: arguments.strikes_a_run], order[arguments.strikes_a_run :]
            chance = random.Random(f"{arguments.seed} {number}")
            passage = world.run_through(f"run{number}", part, chance)
            proof = Proof.of(world.store(), f"run{number}")
            wrong = verdict(calm, proof)
            struck.update(s.fault for s in passage.strikes)
            bad.update(s.fault for s in passage.strikes if wrong)
            order = part[len(passage.strikes) :] + order  # the run was over before these struck
            again = proof.tokens_generated - proof.tokens_committed
            print(
                f"run{number}: {len(passage.strikes)} strikes, {passage.starts} starts, {passage.seconds:.0f} s, "
                f"{'; '.join(wrong) or 'bit-identical'}, {again} of {proof.tokens_generated} tokens in no manifest",
                flush=True,
            )
            results.append({"passage": asdict(passage), "wrong": wrong, "tokens": proof.tokens_generated})
            arguments.out.write_text(json.dumps(results, indent=1, default=str))
    print("\n| fault | strikes | runs that ended differently |\n| --- | --- | --- |")
    for fault in faults:
        print(f"| {fault} | {struck[fault]} | {bad[fault]} |")
    print(f"| all | {sum(struck.values())} | {sum(bool(r['wrong']) for r in results)} |")


if __name__ == "__main__":
    main()
