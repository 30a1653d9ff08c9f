"""Workers that cannot start, and devices that a failed run holds."""

from __future__ import annotations


def test_what_an_engine_refuses_ends_the_run_at_once_with_its_words(world):
    done = world.rlhf(
        "train",
        str(world.preset),
        "--run",
        "refused",
        "--set",
        "generate.engine={max_num_batched_tokens=1}",
        timeout=240,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    last = next(line for line in done.stderr.splitlines() if line.startswith("rlhf: "))
    assert last.startswith("rlhf: start: refused-engine-0 failed: ")
    assert "max_num_batched_tokens" in last
    assert "building failed" not in done.stdout + done.stderr, "it was tried again"
