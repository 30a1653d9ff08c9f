"""What an error that a worker raised means for the run.

Errors of this system are themselves. Any other gets its cause into the first line, and a verdict: WorkerFault if it would come
back however often the same is tried, because what is configured, stored or installed is wrong; else WorkerError.
"""

from __future__ import annotations

from pydantic import ValidationError

from rlhf_core.errors import RLHFError, WorkerError, WorkerFault

#: Built-in errors that do not go away by themselves. Trouble of machines, networks and devices comes as RuntimeError or OSError.
_LASTING = (ValueError, TypeError, LookupError, AttributeError, ImportError, NotImplementedError, FileNotFoundError)

#: vLLM's ValueError while another process gives a GPU's memory back: it passes.
_PASSING = ("Free memory on device",)


def as_ours(error: BaseException, name: str, what: str) -> RLHFError:
    """The error of this system that stands for what worker ``name`` raised in ``what``; picklable, without frames."""
    if isinstance(error, RLHFError):
        return type(error)(*error.args)
    kind = WorkerFault if _lasts(error) else WorkerError
    return kind(f"{what}: {name} failed: {type(error).__name__}: {_words(error)}")


def leaves_doubt(error: BaseException) -> bool:
    """Whether the worker that raised this may be broken itself, e.g. its CUDA context: it is not this system's own word, not of
    another worker, of the store or the disk, and not of what was asked for."""
    from ray.exceptions import RayError

    return not isinstance(error, (RLHFError, RayError, OSError, *_LASTING))


def _lasts(error: BaseException) -> bool:
    from ray.exceptions import RayError

    if isinstance(error, RayError) or any(words in str(error) for words in _PASSING):
        return False
    return isinstance(error, _LASTING)


def _words(error: BaseException) -> str:
    if isinstance(error, ValidationError):  # its own first line is only how many there are
        return "; ".join(
            ": ".join([".".join(map(str, problem["loc"])), problem["msg"]] if problem["loc"] else [problem["msg"]])
            for problem in error.errors(include_url=False)
        )
    return str(error).strip() or "no reason given"
