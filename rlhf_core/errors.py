"""The errors of the system. All of them survive pickling, because Ray ships them between processes.

RLHFError
├── UserError (ValueError)         bad input: names the field, the value and the fix; never retried
│   ├── ConfigError                a config key, its value, or a combination of them
│   ├── PromptError                a prompt source that cannot be used
│   ├── ModelError                 a model folder that cannot be used
│   ├── RewardError                a reward function that cannot be imported or breaks its contract
│   ├── StoreError                 an object store that cannot be reached, written or trusted with these credentials
│   └── CapacityError              more ranks or engines than the cluster can place
├── RunStateError                  the run is not in the state that the call needs
│   ├── RunLocked                  another driver holds the run
│   ├── FencedOut                  this caller was replaced by a newer owner
│   ├── TooManyRestarts            its process died again and again
│   └── NotCommitted               a stage, checkpoint or run that nobody has committed
├── IntegrityError                 bytes or weights that are not what their manifest says
│   ├── CorruptObject              an object whose length or digest differs
│   ├── ConflictingCommit          another attempt committed something with other inputs
│   ├── DigestMismatch             a replayed update gave other weights than the recorded ones
│   └── AgreementError             trainer and engine disagree about logprobs
├── StaleEngine                    an engine serves another policy version than asked for
├── WorkerError                    a rank, engine or reward worker failed; names it and the stage
│   ├── WorkerDied                 it is gone: only rebuilding it helps
│   ├── WorkerFault                it raised what comes back when the same is tried again
│   └── GuardTripped               its update went out of bounds: rebuild the ranks without it
└── NumericsError                  NaN or Inf where the training cannot go on
"""

from __future__ import annotations


class RLHFError(Exception):
    """Base of every error that this system raises on purpose."""


class UserError(RLHFError, ValueError):
    """Bad input. The message says what, the value, and how to fix it."""


class ConfigError(UserError):
    """A config key, its value, or a combination of them."""


class PromptError(UserError):
    """A prompt source that cannot be used."""


class ModelError(UserError):
    """A model folder or id that cannot be used."""


class RewardError(UserError):
    """A reward function that cannot be imported or breaks its contract."""


class StoreError(UserError):
    """An object store that cannot be reached or written, or refuses the credentials."""


class CapacityError(UserError):
    """More ranks or engines than the cluster can place."""


class RunStateError(RLHFError):
    """The run is not in the state that the call needs."""


class RunLocked(RunStateError):
    """Another living driver holds the run."""


class FencedOut(RunStateError):
    """This caller was replaced by a newer owner and must stop."""


class TooManyRestarts(RunStateError):
    """An automation has started the run again and again; somebody has to look."""


class NotCommitted(RunStateError):
    """Nobody has committed this stage, checkpoint or run."""


class IntegrityError(RLHFError):
    """Bytes or weights that are not what their manifest says."""


class CorruptObject(IntegrityError):
    """An object whose length, digest or row count differs from its manifest."""


class ConflictingCommit(IntegrityError):
    """Another attempt committed this stage from other inputs."""


class DigestMismatch(IntegrityError):
    """A replayed update gave other weights than the recorded ones."""


class AgreementError(IntegrityError):
    """Trainer and engine disagree about the logprobs of the same tokens."""


class StaleEngine(RLHFError):
    """An engine serves another policy version than the one asked for."""


class WorkerError(RLHFError):
    """A rank, engine or reward worker failed."""


class WorkerDied(WorkerError):
    """A rank, engine or reward worker, or the cluster below it, is gone; the same call to it cannot succeed."""


class WorkerFault(WorkerError):
    """A worker raised what comes back when the same is tried again: something configured, stored or installed is wrong."""


class GuardTripped(WorkerError):
    """An update went out of bounds and is to be rolled back: the ranks are rebuilt, and the batch is left out."""


class NumericsError(RLHFError):
    """NaN or Inf where the training cannot go on."""
