"""From the name of a reward function to the function. Runs in the reward host, beside the user's code."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from blake3 import blake3

from rlhf_core.errors import RewardError
from rlhf_core.rewards.calling import describe_error
from rlhf_core.rewards.rules import BUILTIN

ARGUMENTS = ("prompts", "completions", "answers", "metadata")
#: Handed to functions whose signature names them.
OPTIONAL = ("completion_ids", "finish_reasons")

#: Modules of files, by path and content.
_LOADED: dict[str, ModuleType] = {}


@dataclass(frozen=True)
class Resolved:
    """A reward function ready to call."""

    function: Callable[..., Any]
    """With its options bound."""
    asks_for: tuple[str, ...]
    """The names in ``OPTIONAL`` that it takes."""


def resolve_reward(function: str, options: Mapping[str, Any]) -> Resolved:
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
    asks_for = _check_callable(function, found, options)
    return Resolved(functools.partial(found, **options), asks_for)


def _import(function: str, origin: str) -> ModuleType:
    try:
        return _load_file(origin) if origin.endswith(".py") else importlib.import_module(origin)
    except FileNotFoundError as error:
        if origin.endswith(".py") and not Path(origin).expanduser().is_file():
            raise RewardError(
                f"reward function {function!r}: the file {str(Path(origin).expanduser().absolute())!r} does not exist"
            ) from None
        raise RewardError(f"reward function {function!r} cannot be imported: {describe_error(error)}") from error
    except BaseException as error:  # boundary: foreign code runs here and may raise anything, SystemExit too
        raise RewardError(f"reward function {function!r} cannot be imported: {describe_error(error)}") from error


def _load_file(origin: str) -> ModuleType:
    path = Path(origin).expanduser().absolute()
    digest = blake3(str(path).encode() + b"\0" + path.read_bytes()).hexdigest(length=8)
    if digest in _LOADED:
        return _LOADED[digest]
    name = path.stem if _is_free(path) else f"rlhf_reward_{path.stem}_{digest}"
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
    _LOADED[digest] = module
    return module


def _is_free(path: Path) -> bool:
    """Whether the file may be the module of its own name, as files beside it and processes it starts would import it: only
    where that name hides nothing."""
    if not path.stem.isidentifier() or path.stem in sys.modules:
        return False
    spec = importlib.util.find_spec(path.stem)
    return spec is not None and spec.origin == str(path)


def _check_callable(function: str, found: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    if inspect.isclass(found) or not callable(found):
        kind = "a class; name an instance or a function" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise RewardError(f"reward function {function!r} is not callable with a batch: it is {kind}")
    clash = sorted(set(options) & {*ARGUMENTS, *OPTIONAL})
    if clash:
        raise RewardError(
            f"reward function {function!r}: the option {clash[0]!r} is the name of an argument; rename it"
        )
    asks_for: tuple[str, ...] = ()
    try:
        signature = inspect.signature(found)
        named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        asks_for = tuple(n for n, p in signature.parameters.items() if n in OPTIONAL and p.kind in named)
        signature.bind(**dict.fromkeys((*ARGUMENTS, *asks_for)), **options)
    except (TypeError, ValueError) as error:
        wanted = ", ".join([*ARGUMENTS, *options])
        raise RewardError(
            f"reward function {function!r} must take the keyword arguments {wanted}: {error}. "
            "Write def NAME(*, prompts, completions, answers, metadata, ...)"
        ) from error
    return asks_for
