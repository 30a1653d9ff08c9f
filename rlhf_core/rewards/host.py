"""Starting and asking a reward host, the process of its own that reward functions live in."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from rlhf_core.rewards.messages import HEADER, Call, Load, Reply, decode_message, digest_file, encode_message

#: How long the interpreter of a host may take to start on a busy machine.
START_SECONDS = 120.0

#: What a host may take to leave by itself when it is not needed any more, so that user code can close its files.
_LEAVE_SECONDS = 5.0


class HostLate(Exception):
    """The host gave no answer in time; it has been ended."""


class HostEnded(Exception):
    """The host's process ended. ``code`` as of subprocess: negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    @property
    def from_outside(self) -> bool:
        """Whether somebody else ended it, as the kernel does when memory runs out."""
        return self.code in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def how(self) -> str:
        """How it ended, for people."""
        return f"exit code {self.code}" if self.code >= 0 else signal.Signals(-self.code).name


@dataclass(frozen=True)
class Conditions:
    """What user code finds around itself: the same in the trial before a run and in every worker."""

    folder: str
    """The working folder: that of the command or flow run."""
    environment: dict[str, str] = field(repr=False)
    """All environment variables. They may be secrets: they go from process to process and are stored nowhere."""
    withheld: frozenset[str] = field(default=frozenset(), repr=False)
    """Names of variables that the driver has and user code does not, to explain what fails for the lack of one."""


class RewardHost:
    """One host. Not for several threads. It ends with ``close``, or with this process."""

    def __init__(self, conditions: Conditions, folder: str = "") -> None:
        """``folder``: where the functions' files lie; empty if they come from packages. OSError if it cannot be started."""
        self._files: dict[str, str] = {}
        self._channel, theirs = socket.socketpair()
        life, self._life = os.pipe()
        module = "rlhf_core.rewards.host_process"
        # -P and -B: no folder of the user hides our modules, and no stale bytecode hides what was repaired a moment ago.
        command = [sys.executable, "-P", "-B", "-u", "-X", "faulthandler", "-m", module]
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(life), folder],
                stdin=subprocess.DEVNULL,
                cwd=conditions.folder,
                env=conditions.environment,
                pass_fds=(theirs.fileno(), life),
                start_new_session=True,  # what user code starts ends with it
            )
        except OSError:
            self._channel.close()
            os.close(self._life)
            raise
        finally:
            theirs.close()
            os.close(life)
        self._ended = os.pidfd_open(self._process.pid)
        self.closed = False
        """Whether the process has ended."""
        self._exchange(b"", START_SECONDS)

    def ask(self, request: Load | Call, seconds: float) -> Reply:
        """The answer to the request. HostLate after the seconds, HostEnded if the process ends; the host is closed then."""
        return self._exchange(encode_message(request), seconds)

    def is_current(self) -> bool:
        """Whether the host lives and every file of the user that it imported is still the same."""
        return not self.closed and all(digest_file(file) == digest for file, digest in self._files.items())

    def close(self) -> None:
        """End the process and all that it started."""
        if self.closed:
            return
        with suppress(OSError):  # it has ended already
            self._channel.sendall(encode_message(None))
        wait([self._ended], _LEAVE_SECONDS)
        self._end()

    def _end(self) -> int:
        self.closed = True
        # Before the process is waited for: until then nobody else can get its number.
        os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._channel.close()
        for descriptor in (self._ended, self._life):
            os.close(descriptor)
        return code

    def _exchange(self, request: bytes, seconds: float) -> Reply:
        deadline = time.monotonic() + seconds
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(request)
            reply: Reply = decode_message(
                self._receive(HEADER.unpack(self._receive(HEADER.size, deadline))[0], deadline)
            )
        except TimeoutError:
            self._end()
            raise HostLate from None
        except (EOFError, ConnectionError):
            wait([self._ended], _LEAVE_SECONDS)
            raise HostEnded(self._end()) from None
        except BaseException:
            self._end()  # the answer that is under way belongs to nobody
            raise
        self._files |= reply.files
        return reply

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            ready = wait([self._channel, self._ended], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            # What user code has forked may hold the other end open, so the process itself is watched too.
            part = self._channel.recv(size - len(data)) if self._channel in ready else b""
            if not part:
                raise EOFError
            data += part
        return bytes(data)
