"""From the name of a reward function to the function, with every mistake found before a model loads."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from blake3 import blake3

from rlhf_core.config.data import RewardConfig
from rlhf_core.errors import RewardError
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.rewards.rules import BUILTIN
from rlhf_core.rewards.scoring import LoadedReward, ScoredBatch, describe_error, score_batch

ARGUMENTS = ("prompts", "completions", "answers", "metadata")


def load_rewards(config: RewardConfig) -> list[LoadedReward]:
    """Resolve every function of the config, in its order. RewardError for the first that cannot be used.

    Functions from a file live in this process only: load them again in every worker, do not pickle them.
    """
    return [
        LoadedReward(f.name or f.function.rpartition(":")[2], f.weight, resolve_reward(f.function, f.options))
        for f in config.functions
    ]


def resolve_reward(function: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function named ``builtin:NAME``, ``package.module:attribute`` or ``path/to/file.py:attribute``, with options
    bound. RewardError with the reason if it cannot be imported, is not callable or does not take the arguments."""
    origin, colon, attribute = function.rpartition(":")
    if not colon or not origin or not attribute:
        raise RewardError(
            f"reward function {function!r}: write builtin:NAME, package.module:attribute or path/to/file.py:attribute"
        )
    if origin == "builtin":
        if attribute not in BUILTIN:
            raise RewardError(f"reward function {function!r}: there is no such builtin; there are {', '.join(BUILTIN)}")
        found: Any = BUILTIN[attribute]
    else:
        found = _import(function, origin)
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise RewardError(f"reward function {function!r}: {origin!r} has no attribute {attribute!r}")
            found = getattr(found, part)
    _check_callable(function, found, options)
    return functools.partial(found, **options)


def try_reward(functions: Sequence[LoadedReward], prompts: Sequence[Prompt]) -> ScoredBatch:
    """Score two sample rows (real prompts, the answer as completion) with every function, and return the scores.

    RewardError if a function raises, breaks its contract, fails on infrastructure, or calls all of these rows and then
    64 more rows of the source invalid: nothing could be learned then.
    """
    answered = [p for p in prompts if p.answer is not None] or list(prompts)
    if not answered:
        raise RewardError("there are no prompts to try the reward functions on")
    scored = _try(functions, (answered * 2)[:2])
    for reward in functions:
        alone = [LoadedReward(reward.name, reward.weight, reward.function)]
        single = _try(alone, answered[:: max(1, len(answered) // 64)][:64]) if "ok" not in scored.status else scored
        if "ok" in single.status:
            continue
        raise RewardError(
            f"reward function {reward.name!r} scored none of {len(single.status)} sample rows; the first: "
            f"{single.status[0]}: {single.error[0] or 'no reason given'}. Check the function, prompts.answer_column "
            "and the servers that the function calls"
        )
    return scored


def _try(functions: Sequence[LoadedReward], rows: Sequence[Prompt]) -> ScoredBatch:
    return score_batch(
        functions,
        sample_ids=[f"trial of prompt {p.prompt_id}" for p in rows],
        prompts=[p.text for p in rows],
        completions=["A sample completion." if p.answer is None else p.answer for p in rows],
        answers=[p.answer for p in rows],
        metadata=[p.metadata for p in rows],
        clip=None,
    )


def _import(function: str, origin: str) -> ModuleType:
    try:
        return _load_file(origin) if origin.endswith(".py") else importlib.import_module(origin)
    except FileNotFoundError as error:
        if origin.endswith(".py") and not Path(origin).expanduser().is_file():
            raise RewardError(
                f"reward function {function!r}: the file {str(Path(origin).expanduser().absolute())!r} does not exist"
            ) from None
        raise RewardError(f"reward function {function!r} cannot be imported: {describe_error(error)}") from error
    except (Exception, SystemExit) as error:  # boundary: foreign code runs here and may raise anything
        raise RewardError(f"reward function {function!r} cannot be imported: {describe_error(error)}") from error


def _load_file(origin: str) -> ModuleType:
    path = Path(origin).expanduser().absolute()
    # Path and content in the name: an edited file is another module, and no name can hide an installed package.
    digest = blake3(str(path).encode() + b"\0" + path.read_bytes()).hexdigest(length=8)
    name = f"rlhf_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_callable(function: str, found: Any, options: Mapping[str, Any]) -> None:
    if inspect.isclass(found) or not callable(found):
        kind = "a class; name an instance or a function" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise RewardError(f"reward function {function!r} is not callable with a batch: it is {kind}")
    clash = sorted(set(options) & set(ARGUMENTS))
    if clash:
        raise RewardError(
            f"reward function {function!r}: the option {clash[0]!r} is the name of an argument; rename it"
        )
    try:
        signature = inspect.signature(found)
        signature.bind(**dict.fromkeys(ARGUMENTS), **options)
    except (TypeError, ValueError) as error:
        wanted = ", ".join([*ARGUMENTS, *options])
        raise RewardError(
            f"reward function {function!r} must take the keyword arguments {wanted}: {error}. "
            "Write def NAME(*, prompts, completions, answers, metadata, ...)"
        ) from error
