"""Creating, finding and calling actors. The only place that knows how Ray reports trouble."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.actors.failures import as_ours
from rlhf_core.actors.watch import CONTROL_GROUP, POLL_SECONDS, Patience, Watch
from rlhf_core.errors import FencedOut, RLHFError, WorkerDied, WorkerError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActorSpec:
    """One actor to create. ``options`` are Ray's (resources, placement, runtime environment)."""

    name: str
    actor_class: type
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def create(specs: Sequence[ActorSpec], namespace: str) -> list[Any]:
    """Create detached, named actors; their constructors run in parallel. They survive the driver."""
    import ray

    return [
        # Claims and status answer while a call runs; all other calls run one after another on one thread.
        ray.remote(concurrency_groups={CONTROL_GROUP: 1})(_reporting(spec.actor_class))
        .options(
            name=spec.name,
            namespace=namespace,
            lifetime="detached",
            max_restarts=0,  # a restarted actor would hold the base weights and nobody would know
            max_task_retries=0,
            **spec.options,
        )
        .remote(spec.name, *spec.arguments)
        for spec in specs
    ]


def _reporting(actor_class: type) -> type:
    """The class with a constructor that never raises: ``claim`` and ``status`` raise what it raised.

    Ray ends an actor whose constructor raises and passes its error on as text only.
    """

    class Reporting(actor_class):
        def __init__(self, name: str, *arguments: Any) -> None:
            self._failure: RLHFError | None = None
            try:
                super().__init__(name, *arguments)
            except Exception as error:  # a boundary: the first call from outside gets it
                logger.exception("%s cannot start", name)
                self._failure = as_ours(error, name, "start")

        def claim(self, epoch: int) -> dict[str, Any]:
            self._require_started()
            return super().claim(epoch)

        def status(self) -> dict[str, Any]:
            self._require_started()
            return super().status()

        def _require_started(self) -> None:
            if self._failure is not None:
                raise self._failure

    Reporting.__name__ = Reporting.__qualname__ = actor_class.__name__
    return Reporting


class ActorGroup:
    """Actors of one kind, called together. ``names`` in rank order.

    With ``patience``, those that hang in a call are found long before its deadline, ended, and reported as WorkerDied.
    """

    def __init__(self, names: Sequence[str], namespace: str, epoch: int, patience: Patience | None = None) -> None:
        self.names, self.namespace, self.epoch, self.patience = tuple(names), namespace, epoch, patience

    @property
    def handles(self) -> list[Any]:
        """In rank order. WorkerError naming the actor that no longer exists."""
        found = self._find()
        for handle in found:
            if isinstance(handle, WorkerDied):
                raise handle
        return found

    def call(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        """Call every actor with the epoch and the same arguments; results in rank order. See ``gather``."""
        return self.call_each(method, [arguments] * len(self.names), seconds=seconds)

    def start(self, seconds: float) -> list[dict[str, Any]]:
        """Claim actors that were just created, when their constructors have ended; returns their statuses.

        What a constructor raised is raised here, see ``failures``, and the actors that could not start are ended.
        """
        calls = self._claims()
        try:
            return gather(list(calls.values()), self.names, "start", seconds)
        except FencedOut:
            raise
        except RLHFError:
            kill([name for name, call in calls.items() if _has_failed(call)], self.namespace)
            raise

    def call_claim(self, seconds: float) -> list[dict[str, Any]]:
        """Claim every actor for this epoch; returns their statuses. Waits for constructors that still run."""
        return gather(list(self._claims().values()), self.names, "claim", seconds)

    def call_status(self, seconds: float) -> list[dict[str, Any]]:
        """Status of every actor."""
        calls = [h.status.options(concurrency_group=CONTROL_GROUP).remote() for h in self.handles]
        return gather(calls, self.names, "status", seconds)

    def call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, seconds: float, beside: ActorGroup | None = None
    ) -> list[Any]:
        """Call actor i with the epoch and ``arguments[i]``; results in rank order. See ``gather``.

        ``beside``: actors that these ones call; they are watched too.
        """
        handles = self.handles
        calls = [getattr(h, method).remote(self.epoch, *a) for h, a in zip(handles, arguments, strict=False)]
        return gather(calls, self.names, method, seconds, self._watch(handles, beside))

    def call_surviving(self, method: str, arguments: Sequence[tuple[Any, ...]], *, seconds: float) -> list[Any]:
        """As ``call_each``, but the place of an actor that is dead or dies holds its WorkerDied; all others are waited for."""
        results = self._find()[: len(arguments)]
        living = [index for index, handle in enumerate(results) if not isinstance(handle, WorkerDied)]
        calls = [getattr(results[index], method).remote(self.epoch, *arguments[index]) for index in living]
        watch, names = self._watch(results), [self.names[index] for index in living]
        for number, outcome in _outcomes(calls, names, method, seconds, watch):
            if isinstance(outcome, RLHFError) and not isinstance(outcome, WorkerDied):
                raise outcome
            results[living[number]] = outcome
        return results

    def _claims(self) -> dict[str, Any]:
        handles = zip(self.names, self.handles, strict=True)
        return {name: h.claim.options(concurrency_group=CONTROL_GROUP).remote(self.epoch) for name, h in handles}

    def watch(self, beside: ActorGroup | None = None) -> Watch | None:
        """Looks after these actors and those of ``beside`` while calls to them are gathered; None without patience."""
        return self._watch(self._find(), beside)

    def _watch(self, handles: Sequence[Any], beside: ActorGroup | None = None) -> Watch | None:
        if self.patience is None:
            return None
        watched = dict(zip(self.names, handles, strict=False))
        if beside is not None:
            watched |= zip(beside.names, beside._find(), strict=True)
        living = {name: handle for name, handle in watched.items() if not isinstance(handle, WorkerDied)}
        return Watch(living, self.epoch, self.patience)

    def _find(self) -> list[Any]:
        """Handles in rank order; WorkerDied in the place of an actor that no longer exists."""
        import ray

        found: list[Any] = []
        for name in self.names:
            try:
                found.append(ray.get_actor(name, namespace=self.namespace))
            except ValueError:
                found.append(WorkerDied(f"{name} is gone: it died, or the run was ended elsewhere"))
        return found


def gather(
    calls: Sequence[Any], names: Sequence[str], what: str, seconds: float, watch: Watch | None = None
) -> list[Any]:
    """Results of all calls, in order, within the deadline.

    The first failure is raised at once, without waiting for ranks that may hang in a collective because of it. Errors of this
    system come out as themselves; a dead actor, any other error and a missed deadline are WorkerError naming the actor.
    With a ``watch``, so is an actor that hangs: it is ended, and counts as dead.
    """
    results: list[Any] = [None] * len(calls)
    for index, outcome in _outcomes(calls, names, what, seconds, watch):
        if isinstance(outcome, RLHFError):
            raise outcome
        results[index] = outcome
    return results


def _outcomes(
    calls: Sequence[Any], names: Sequence[str], what: str, seconds: float, watch: Watch | None
) -> Iterator[tuple[int, Any]]:
    """(position, result or error) of every call as it ends. WorkerError if some have not ended within the deadline."""
    import ray

    waiting, deadline = {call: index for index, call in enumerate(calls)}, time.monotonic() + seconds
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left if watch is None else min(left, POLL_SECONDS))
        if not ready and not left:
            late = ", ".join(names[index] for index in waiting.values())
            raise WorkerError(f"{what}: no answer from {late} within {seconds:.0f} s")
        for call in ready:
            index = waiting.pop(call)
            if watch is not None:
                watch.leave(names[index])
            yield index, _outcome(call, names[index], what)
        if watch is not None:
            yield from _hanging(watch, waiting, names, what)


def _hanging(
    watch: Watch, waiting: dict[Any, int], names: Sequence[str], what: str
) -> Iterator[tuple[int, WorkerDied]]:
    """End the actors that hang, and take their calls out of ``waiting``. Raised are those that are only called by others."""
    complaints = watch.look()
    errors = {name: WorkerDied(f"{what}: {name} {text}: it was ended") for name, text in complaints.items()}
    for name, error in errors.items():
        logger.warning("%s", error)
        watch.end(name)
    calls = {names[index]: call for call, index in waiting.items()}
    for name, error in errors.items():
        if name not in calls:
            raise error
        yield waiting.pop(calls[name]), error


def _outcome(call: Any, name: str, what: str) -> Any:
    """The result, or what went wrong as an error of this system."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(call)
    except RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, RayTaskError):  # one in another where the worker has called a worker
            cause = cause.cause
        return _caused(as_ours(cause, name, what), error)
    except RayError as error:  # RayActorError, OutOfMemoryError (killed for memory), a lost node, ...
        return _caused(WorkerDied(f"{what}: {name} died: {_last_words(error)}"), error)


def _caused(error: RLHFError, cause: BaseException) -> RLHFError:
    error.__cause__ = cause
    return error


def _last_words(error: Exception) -> str:
    """One line of what Ray says, without what it guesses."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        return str(error.cause)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    return (causes or lines)[0].partition(" Some common causes")[0]


def _has_failed(call: Any) -> bool:
    """Whether the call has ended with an error by now."""
    import ray
    from ray.exceptions import RayError

    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except RayError:
        return True
    return False


def kill(names: Sequence[str], namespace: str) -> list[str]:
    """End the actors that exist; returns their names. Their processes are gone shortly afterwards."""
    import ray

    ended = []
    for name in names:
        try:
            handle = ray.get_actor(name, namespace=namespace)
        except ValueError:
            continue
        ray.kill(handle)
        ended.append(name)
    return ended


def statuses(names: Sequence[str], namespace: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Status of the actors that exist and answer within the deadline."""
    import ray
    from ray.exceptions import RayError

    calls: dict[str, Any] = {}
    for name in names:
        try:
            status = ray.get_actor(name, namespace=namespace).status
            calls[name] = status.options(concurrency_group=CONTROL_GROUP).remote()
        except ValueError:
            continue
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    for name, call in calls.items():
        try:
            found[name] = ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
        except RayError as error:
            logger.warning("%s does not answer: %s", name, _last_words(error))
    return found
