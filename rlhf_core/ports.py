"""The seams: what the core needs from the outside, as narrow protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rlhf_core.rewards.contract import RewardResult


@runtime_checkable
class ObjectStore(Protocol):
    """A flat key-value store of immutable bytes. Keys are relative paths with ``/``; no ``..``, no leading ``/``.

    Implementations are picklable and hold configuration only, never connections or credentials, so that they can travel
    to Ray workers. Errors: a missing key is FileNotFoundError; anything else that survived the bounded
    retries is OSError, with errno EBADMSG where the store itself says that an object is damaged.
    """

    @property
    def url(self) -> str:
        """Where the store is, for people (no credentials in it)."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object. It appears whole or not at all."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if the key is absent. True: this call created it. False: the key exists already.

        After an unknown outcome (a lost answer) it may say False for its own write; the caller reads back and compares.
        """
        ...

    def get(self, key: str) -> bytes:
        """The whole object. FileNotFoundError if there is none."""
        ...

    def exists(self, key: str) -> bool: ...

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below ``prefix``, sorted, without a look at what they hold. Same use as ``list``."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys below ``prefix`` (a folder), sorted; for garbage collection and people, never for correctness."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; keys that are absent are skipped."""
        ...

    def put_file(self, key: str, path: str) -> None:
        """Upload a local file with bounded memory."""
        ...

    def get_file(self, key: str, path: str) -> None:
        """Download an object to a local file with bounded memory."""
        ...


class RewardFunction(Protocol):
    """Scores completions. Pure: the same inputs give the same scores. May be ``async``.

    Called with keyword arguments as parallel lists of one length N: ``prompts`` (text of the prompt as the user gave
    it), ``completions`` (decoded response text, without special tokens unless `reward.special_tokens` is set), ``answers``
    (the prompt's answer column or None) and ``metadata`` (the prompt's other columns as dicts). One whose signature names
    them also gets ``completion_ids`` (lists of the response's token ids, special ones included) and ``finish_reasons``
    (``stop`` or ``length``). Returns N floats or RewardResult; None for a row that it has nothing to say about.

    Called, before the run and in each worker, on the main thread of a process of its own, with one event loop that is kept, in
    the folder of the command, with the usual variables of a shell and those of `reward.environment`.
    """

    def __call__(
        self,
        *,
        prompts: list[str],
        completions: list[str],
        answers: list[str | None],
        metadata: list[dict[str, Any]],
    ) -> Sequence[float | RewardResult | None]: ...
