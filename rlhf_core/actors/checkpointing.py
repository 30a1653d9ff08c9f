"""A rank's part of a checkpoint between its local folder and the object store.

A save is collective and ends on the local disk; the upload follows on a thread while training goes on, so that no rank
waits for the store inside a collective. The driver publishes the checkpoint once every rank has brought its files up.
"""

from __future__ import annotations

import pickle
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.errors import CorruptObject
from rlhf_core.files import download_files, upload_files
from rlhf_core.manifests import StoredFile
from rlhf_core.ports import ObjectStore

#: What DeepSpeed's own checkpoint files hold beside tensors and plain containers. Anything else is refused unread, because
#: DeepSpeed unpickles without restrictions.
_KNOWN_GLOBALS = frozenset(
    {
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    }
)


@dataclass(frozen=True)
class SavedCheckpoint:
    """Where one rank stands with its newest checkpoint. ``files`` is None while it is being uploaded."""

    version: int
    attempt: str
    files: tuple[StoredFile, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Room:
    """What one rank's part of a checkpoint needs on its disk, and what is free there, in bytes."""

    disk: str
    """Host and device: ranks that share it have the same."""
    folder: str
    needed: int
    free: int

    @classmethod
    def at(cls, folder: Path, needed: int) -> Room:
        """For a part of about ``needed`` bytes below ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        disk = f"{socket.gethostname()} {folder.stat().st_dev}"
        return cls(disk, str(folder), needed, shutil.disk_usage(folder).free)


def lack_of_room(rooms: Sequence[Room]) -> str | None:
    """Which disk cannot take what the ranks want to write to it, for people; None if all can."""
    needed: Counter[str] = Counter()
    for room in rooms:
        needed[room.disk] += room.needed
    for room in rooms:
        if needed[room.disk] > room.free:
            return f"{room.folder} has {room.free >> 20} MiB free, it takes about {needed[room.disk] >> 20} MiB"
    return None


@dataclass
class CheckpointUpload:
    """Uploads one rank's files of one checkpoint and deletes them locally afterwards."""

    store: ObjectStore
    version: int
    attempt: str
    folder: Path
    prefix: str
    rank: int
    _result: SavedCheckpoint | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Begin; ``state`` tells the rest."""
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{self.version}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> SavedCheckpoint:
        return self._result or SavedCheckpoint(self.version, self.attempt)

    def wait(self) -> SavedCheckpoint:
        """The final state."""
        if self._thread is not None:
            self._thread.join()
        return self.state

    def _run(self) -> None:
        try:
            mine = own_files(self.folder, self.rank)
            files = upload_files(self.store, self.folder, mine, self.prefix)
            self._result = SavedCheckpoint(self.version, self.attempt, tuple(files))
        except Exception as error:  # noqa: BLE001  # a thread's boundary: the driver reports it, and replay covers the loss
            self._result = SavedCheckpoint(self.version, self.attempt, error=f"{type(error).__name__}: {error}")
        finally:
            for path in own_files(self.folder, self.rank):
                path.unlink(missing_ok=True)


def own_files(folder: Path, rank: int) -> list[Path]:
    """The files below ``folder`` that this rank wrote: those of its number; all that have none are rank 0's."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in files if _rank_of(path) == rank)


def files_of_rank(files: Iterable[StoredFile], rank: int) -> list[StoredFile]:
    """The files of a checkpoint that this rank reads."""
    return [file for file in files if _rank_of(Path(file.path)) == rank]


def fetch(store: ObjectStore, files: Sequence[StoredFile], rank: int | None, folder: Path) -> None:
    """Bring this rank's files (all of them for None) to ``folder``, verified and free of what would run code when loaded."""
    mine = list(files) if rank is None else files_of_rank(files, rank)
    download_files(store, mine, folder)
    for file in mine:
        require_harmless(folder / file.path, file.key)


def require_harmless(path: Path, key: str) -> None:
    """CorruptObject if the pickle at ``path`` names anything but what DeepSpeed's files are known to hold, or is none of
    ``torch.save``'s: the loader would unpickle other files as well."""
    if path.suffix != ".pt":
        return
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        found = set(get_unsafe_globals_in_checkpoint(str(path))) - _KNOWN_GLOBALS
    except (ValueError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CorruptObject(f"{key} is no file that torch.save writes: {error}; refused") from None
    if found:
        raise CorruptObject(
            f"{key} would run {', '.join(sorted(found))} when loaded: no checkpoint of ours does; refused"
        )


def discard(folder: Path) -> None:
    """Delete a local folder that is no longer needed."""
    shutil.rmtree(folder, ignore_errors=True)


def _rank_of(path: Path) -> int:
    _, mark, rest = path.name.partition("zero_pp_rank_")
    number = rest.partition("_")[0]
    return int(number) if mark and number.isdigit() else 0
