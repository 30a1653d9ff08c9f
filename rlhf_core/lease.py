"""One driver per run: a lease in the object store that needs only put, create, get and exists.

The driver of epoch n owns ``lease/{n}.json``, made by put-if-absent, and rewrites a heartbeat beside it from a
background thread. Whoever creates epoch n + 1 has taken over; the driver of epoch n finds that out by ``check()`` and
must stop. That creation alone is the fence: a driver that could not write heartbeats, because the store was away, goes
on if nobody has created n + 1.
The lease saves work and gives clear errors; it is not what keeps the data safe, every commit is put-if-absent too.

When a lease counts as free, and the clocks behind it:

* its holder released it;
* its holder ran on this host and that process is gone (process id and start, so a reused id does not count; the start is
  counted from the boot, because clocks are set);
* it expired: the heartbeat's timestamp is older than its ttl by our clock. Clocks differ between hosts and jump, and the
  store may just be back from an outage in which nobody could write, so the heartbeat is then watched for a third of the
  ttl, more than one beat, and a counter that still changes means a living holder;
* its timestamp lies more than a ttl ahead of our clock, so that the clocks say nothing, and it stands still while it is
  watched for a whole ttl.

A holder that was silent for longer than its ttl writes a heartbeat and then looks for n + 1, in this order. Another
driver reads the heartbeat last and then creates n + 1. So if the holder does not see n + 1, the other one either sees
the heartbeat and leaves the run alone, or has read it before and creates n + 1 right afterwards: then it is the driver,
and the holder's next check finds it. At no time two drivers both pass a check that began after n + 1 was created.

Same host means the same host name; containers that share one but not their process ids must not drive the same run.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from pydantic import Field

from rlhf_core import layout
from rlhf_core.errors import FencedOut, RunLocked
from rlhf_core.manifests import FORMAT_VERSION, Manifest
from rlhf_core.ports import ObjectStore
from rlhf_core.records import canonical, commit_record, find_record, load_record, seal
from rlhf_core.searching import count_without_gaps

_LOG = logging.getLogger(__name__)
_BEATS_PER_TTL = 4
_WATCH_PART = 1 / 3  # of the ttl: longer than one beat
_LOOKS = 8  # at a heartbeat while it is watched
_START_TOLERANCE = 5.0  # seconds, for claims of older releases; the kernel's boot time moves with the clock
_ROUNDS = 16  # lost races before giving up


class Holder(Manifest):
    """A process that may drive a run."""

    host: str
    pid: int
    process_start: float = Field(description="Unix seconds by the clock of that time.")
    user: str
    started: str = Field("", description="Boot and clock ticks since then; tells a reused process id from the holder.")

    @classmethod
    def current(cls) -> Holder:
        """This process."""
        process = psutil.Process()
        return cls(
            host=socket.gethostname(),
            pid=process.pid,
            process_start=process.create_time(),
            user=process.username(),
            started=_started(process.pid),
        )

    def __str__(self) -> str:
        return f"{self.user}@{self.host} pid {self.pid}"


class Claim(Manifest):
    """Who drives the run in an epoch. Written once."""

    format: int = FORMAT_VERSION
    run: str
    epoch: int = Field(ge=1)
    holder: Holder
    token: str = Field(description="Unique to this claim; what actors compare to refuse an older owner.")
    acquired_at: float = Field(description="Unix seconds.")
    ttl_seconds: float = Field(gt=0)
    digest: str = ""


class Heartbeat(Manifest):
    """The last sign of life of a claim. Rewritten."""

    format: int = FORMAT_VERSION
    epoch: int = Field(ge=1)
    token: str
    counter: int = Field(ge=0)
    at: float = Field(description="Unix seconds by the holder's clock.")
    released: bool = False
    digest: str = ""


@dataclass(frozen=True)
class LeaseState:
    """The newest claim of a run and its last heartbeat."""

    claim: Claim
    beat: Heartbeat | None

    @property
    def released(self) -> bool:
        """Whether the holder has ended it."""
        return self.beat is not None and self.beat.released

    @property
    def last_seen(self) -> float:
        """Unix seconds of the last heartbeat; of the claim where none was written yet."""
        return self.beat.at if self.beat is not None else self.claim.acquired_at


def lease_state(store: ObjectStore, run: str) -> LeaseState | None:
    """The newest claim of the run, living or not; None if nobody ever drove it."""
    epoch = _newest_epoch(store, run)
    return _read_state(store, run, epoch) if epoch else None


def require_free(store: ObjectStore, run: str, holder: Holder) -> None:
    """RunLocked if another living driver holds the run; takes nothing. For a check long before ``Lease.acquire``."""
    state = lease_state(store, run)
    if state is not None:
        _require_free(store, state, holder)


class Lease:
    """A held lease. Made by ``acquire``; as a context manager it is released at the end."""

    def __init__(self, store: ObjectStore, claim: Claim, claimed_at: float, beats: ObjectStore | None = None) -> None:
        self.store, self.claim = store, claim
        self._beats = beats or store
        self._beating = threading.Lock()  # one writer at a time, so that an old heartbeat never replaces a newer one
        self._counter = 0
        self._written_at = claimed_at  # monotonic; the claim itself is the first sign of life
        self._fenced = self._released = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{claim.run}-{claim.epoch}", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        store: ObjectStore,
        run: str,
        holder: Holder,
        ttl_seconds: float = 60.0,
        beats: ObjectStore | None = None,
    ) -> Lease:
        """Become the driver of the run.

        RunLocked names the living holder and how to take over. Of several racers exactly one wins. OSError if the store
        fails. ``ttl_seconds`` is how long a dead driver on another host blocks the run, at least.
        ``beats`` is what the heartbeat thread and ``release`` use: give the store without patience where ``store``
        outlasts outages, because both try again or give up by themselves.
        """
        layout.check_run(run)
        if ttl_seconds <= 0:
            raise ValueError(f"ttl_seconds = {ttl_seconds}: a positive number of seconds is needed")
        epoch = 0
        for _ in range(_ROUNDS):
            epoch = _newest_epoch(store, run, epoch)
            if epoch:
                _require_free(store, _read_state(store, run, epoch), holder)
            claim = Claim(
                run=run,
                epoch=epoch + 1,
                holder=holder,
                token=f"{epoch + 1:06d}-{uuid.uuid4().hex}",
                acquired_at=_wall_clock(),
                ttl_seconds=ttl_seconds,
            )
            before = time.monotonic()
            stored, mine = commit_record(store, layout.lease(run, epoch + 1), claim)
            if mine:
                return cls(store, stored, before, beats)
        raise RunLocked(
            f"run {run!r}: {_ROUNDS} other drivers were faster in a row; now epoch {epoch} is reached: try again"
        )

    @property
    def epoch(self) -> int:
        """Number of this claim; later owners have higher ones."""
        return self.claim.epoch

    @property
    def token(self) -> str:
        """Unique to this claim; sorts by epoch."""
        return self.claim.token

    def check(self) -> None:
        """Return if this is still the driver. FencedOut if not; OSError if the store does not tell.

        Costs one ``exists``. Call it before what must not be done twice, and before commits. After a silence longer
        than the ttl it writes a heartbeat first, and OSError also means that this could not be done.
        """
        run = self.claim.run
        if self._released:
            raise FencedOut(f"run {run!r}: this driver released its lease (epoch {self.epoch})")
        failure = None if self._fenced else self._break_silence()
        if self._fenced or self._newer_exists(self.store):
            raise FencedOut(
                f"run {run!r}: {self._successor()} took over from epoch {self.epoch}: this driver must stop"
            )
        if failure is not None:
            raise OSError(
                f"run {run!r}: no heartbeat could be written to {self.store.url} for {self._silent():.1f} s, the lease "
                f"lasts {self.claim.ttl_seconds:g} s: {failure}"
            ) from failure

    def release(self) -> None:
        """Let the next driver in at once. Idempotent. If the store fails, that is logged and the lease expires."""
        if self._released:
            return
        self._released = True
        self._stop.set()
        self._thread.join(self.claim.ttl_seconds)
        try:
            with self._beating:
                self._write(self._beats, released=True)
        except OSError as error:
            _LOG.warning(
                "run %s: the lease could not be released, it expires in %.0f s: %s",
                self.claim.run,
                self.claim.ttl_seconds,
                error,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep(self) -> None:
        """The heartbeat thread."""
        pause = self.claim.ttl_seconds / _BEATS_PER_TTL
        failing = False
        while not self._stop.is_set():
            try:
                with self._beating:
                    self._write(self._beats)
                if self._newer_exists(self._beats):
                    return
                failing = False
            except Exception as error:  # noqa: BLE001  # a boundary: the next beat tries again, check() decides
                if not failing:
                    _LOG.warning("run %s: heartbeats of the lease fail, trying on: %s", self.claim.run, error)
                failing = True
            self._stop.wait(pause)

    def _silent(self) -> float:
        """Seconds since the last heartbeat was begun that the store took."""
        return time.monotonic() - self._written_at

    def _break_silence(self) -> OSError | None:
        """Write a heartbeat if the last one is older than the ttl; what the store said if it could not be written."""
        # At most twice: a patient store may have waited for so long that the first one is old on arrival.
        for _ in range(2):
            if self._silent() <= self.claim.ttl_seconds:
                return None
            with self._beating:
                if self._silent() <= self.claim.ttl_seconds:  # the thread's heartbeat came through meanwhile
                    return None
                try:
                    self._write(self.store)
                except OSError as error:
                    return error
        return None

    def _write(self, store: ObjectStore, released: bool = False) -> None:
        before = time.monotonic()  # the beat counts from when it was begun: a slow store must not lengthen the lease
        self._counter += 1
        beat = Heartbeat(epoch=self.epoch, token=self.token, counter=self._counter, at=_wall_clock(), released=released)
        store.put(layout.heartbeat(self.claim.run, self.epoch), canonical(seal(beat).model_dump(mode="json")))
        self._written_at = before

    def _newer_exists(self, store: ObjectStore) -> bool:
        self._fenced = self._fenced or store.exists(layout.lease(self.claim.run, self.epoch + 1))
        return self._fenced

    def _successor(self) -> str:
        try:
            state = lease_state(self._beats, self.claim.run)
        except OSError:  # only the name is missing then
            state = None
        return "another driver" if state is None else f"{state.claim.holder} (epoch {state.claim.epoch})"


def _newest_epoch(store: ObjectStore, run: str, known: int = 0) -> int:
    """The highest epoch that was claimed; 0 if none."""
    return count_without_gaps(lambda n: store.exists(layout.lease(run, n + 1)), known)


def _read_state(store: ObjectStore, run: str, epoch: int) -> LeaseState:
    claim = load_record(store, layout.lease(run, epoch), Claim)
    return LeaseState(claim, find_record(store, layout.heartbeat(run, epoch), Heartbeat))


def _require_free(store: ObjectStore, state: LeaseState, holder: Holder) -> None:
    """RunLocked if the claim's holder lives."""
    owner, ttl = state.claim.holder, state.claim.ttl_seconds
    same_host = owner.host == holder.host
    if state.released or (same_host and not _lives(owner)):
        return
    age = _wall_clock() - state.last_seen
    if abs(age) > ttl and not _still_beats(store, state, ttl * _WATCH_PART if age > 0 else ttl):
        return
    since = datetime.fromtimestamp(state.claim.acquired_at, UTC).isoformat(timespec="seconds")
    last = datetime.fromtimestamp(state.last_seen, UTC).isoformat(timespec="seconds")
    wait = min(ttl, max(0.0, ttl - age))
    raise RunLocked(
        f"run {state.claim.run!r} is driven by {owner} since {since}, last heartbeat {last}. To take over, end that "
        f"process (on {owner.host}: kill {owner.pid}); if it is dead already, try again in {wait:.0f} s"
    )


def _still_beats(store: ObjectStore, state: LeaseState, seconds: float) -> bool:
    for _ in range(_LOOKS):
        time.sleep(seconds / _LOOKS)
        later = find_record(store, layout.heartbeat(state.claim.run, state.claim.epoch), Heartbeat)
        if later != state.beat:
            return later is not None and not later.released
    return False


def _wall_clock() -> float:
    """Unix seconds. Only compared with those of other processes, and never believed alone; all else here is monotonic."""
    return time.time()


def _started(pid: int) -> str:
    """When the process was started, whatever the clock says now. psutil.NoSuchProcess if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None


def _lives(holder: Holder) -> bool:
    try:
        process = psutil.Process(holder.pid)
        if holder.started:
            same = _started(holder.pid) == holder.started
        else:
            same = abs(process.create_time() - holder.process_start) < _START_TOLERANCE
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it exists, and another user's process may well be the holder
        return True
