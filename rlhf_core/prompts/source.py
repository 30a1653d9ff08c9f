"""Prompts of a run: load them, and hold some out for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import PromptError
from rlhf_core.prompts.arithmetic import arithmetic_rows
from rlhf_core.prompts.prompt import Columns, Prompt, Row, build_prompts, content_digest
from rlhf_core.prompts.readers import read_rows
from rlhf_core.prompts.values import column_names, columns_found

__all__ = ["Prompt", "load_prompts", "missing_answers", "split_heldout"]


def load_prompts(config: PromptsConfig, seed: int) -> list[Prompt]:
    """All prompts of the source, in its order. ``seed`` only matters for generated prompts.

    Rows keep duplicates; ``prompt_id`` is unique and stable for the same source. PromptError says what is wrong where.
    """
    if config.source == "arithmetic":
        made = enumerate(arithmetic_rows(config.arithmetic, seed), start=1)
        return build_prompts((Row(f"row {n}", v) for n, v in made), Columns(), "arithmetic")
    if config.prompt_column == config.answer_column:
        raise PromptError(f"prompts.prompt_column and prompts.answer_column are both {config.prompt_column!r}")
    # The default may be absent, for rewards that need no answer; a name that somebody chose may not.
    required = config.answer_column != PromptsConfig().answer_column
    columns = Columns(config.prompt_column, config.answer_column, required, config.tools_column)
    return build_prompts(read_rows(config.source, config.split, config.config), columns, config.source)


def missing_answers(config: PromptsConfig, prompts: Sequence[Prompt]) -> str:
    """For a message about rewards that find no answer: that no prompt has one, and the columns there are; else empty."""
    if any(prompt.answer is not None for prompt in prompts):
        return ""
    names = dict.fromkeys(name for prompt in prompts[:64] for name in column_names(prompt.metadata))
    column = config.answer_column
    return f". No prompt has an answer: prompts.answer_column = {column!r}; {columns_found(column, list(names))}"


def split_heldout(prompts: Sequence[Prompt], heldout: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split into (train, held out), each in the given order, with no conversation on both sides.

    Held out are exactly ``heldout`` distinct prompts (the first of each; its repetitions are in neither part). The
    choice ranks every prompt by a hash of seed and content, so it does not depend on the order of the source, and new
    prompts in the source displace few. PromptError if nothing would be left to train on.
    """
    keys = [content_digest(p.text, p.messages, p.tools) for p in prompts]
    distinct = set(keys)
    if heldout >= len(distinct):
        raise PromptError(
            f"prompts.heldout = {heldout}, but the source has {len(distinct)} distinct prompts: "
            f"hold out at most {max(len(distinct) - 1, 0)}, or give more prompts"
        )
    chosen = set(sorted(distinct, key=lambda key: blake3(f"{seed}:{key}".encode()).digest())[:heldout])
    train = [p for p, key in zip(prompts, keys, strict=True) if key not in chosen]
    held: dict[str, Prompt] = {}
    for prompt, key in zip(prompts, keys, strict=True):
        if key in chosen:
            held.setdefault(key, prompt)
    return train, list(held.values())
