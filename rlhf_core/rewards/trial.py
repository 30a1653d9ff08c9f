"""Trying the reward functions before a model loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf_core.config.data import RewardConfig
from rlhf_core.errors import RewardError
from rlhf_core.models.tokenizer import text_tokenizer
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.rewards.contract import Answer
from rlhf_core.rewards.host import Conditions
from rlhf_core.rewards.scorer import Rows, Scorer
from rlhf_core.rewards.scoring import NOTHING_SAID, ScoredBatch

#: Rows that a function is tried on if it scores neither of the first two.
_MORE_ROWS = 64


def try_reward(
    config: RewardConfig, conditions: Conditions, prompts: Sequence[Prompt], model: Callable[[], Path]
) -> ScoredBatch:
    """Score two sample rows (real prompts, the answer as completion) as a worker would, and return the scores.

    ``model`` gives the policy's folder, whose tokenizer is needed only by functions that ask for token ids. RewardError if a
    function raises, breaks its contract, gives no answer in time, or fails on infrastructure or calls invalid both these rows
    and then 64 more rows of the source, or if all functions abstain there: nothing could be learned then.
    """
    answered = [p for p in prompts if p.answer is not None] or list(prompts)
    if not answered:
        raise RewardError("there are no prompts to try the reward functions on")
    with Scorer(config, conditions) as scorer:
        folder = model() if "completion_ids" in scorer.load() else None
        scored = scorer.score(_rows((answered * 2)[:2], folder))
        if "ok" not in scored.status:
            _check_answers(scorer.answers(_rows(answered[:: max(1, len(answered) // _MORE_ROWS)][:_MORE_ROWS], folder)))
    return scored


def _check_answers(answers: Mapping[str, Sequence[Answer]]) -> None:
    for name, given in answers.items():
        said = [answer for answer in given if answer is not None]
        if said and all(answer.value is None for answer in said):
            raise RewardError(
                f"reward function {name!r} scored none of {len(given)} sample rows; the first: {said[0].status}: "
                f"{name}: {said[0].error or 'no reason given'}. Check the function, prompts.answer_column "
                "and the servers that the function calls"
            )
    if all(answer is None for given in answers.values() for answer in given):
        raise RewardError(
            f"{NOTHING_SAID} about {len(next(iter(answers.values())))} sample rows: {', '.join(map(repr, answers))} returned "
            "None for each of them. Return a number where there is a score"
        )


def _rows(prompts: Sequence[Prompt], folder: Path | None) -> Rows:
    completions = ["A sample completion." if p.answer is None else p.answer for p in prompts]
    return Rows(
        sample_ids=[f"trial of prompt {p.prompt_id}" for p in prompts],
        prompts=[p.text for p in prompts],
        completions=completions,
        answers=[p.answer for p in prompts],
        metadata=[p.metadata for p in prompts],
        completion_ids=[[] for _ in prompts] if folder is None else _token_ids(folder, completions),
        finish_reasons=["stop" for _ in prompts],
    )


def _token_ids(folder: Path, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in text_tokenizer(folder).encode_batch(texts, add_special_tokens=False)]
