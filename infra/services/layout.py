"""Names and paths of the local services."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from infra.services.errors import ServiceError

#: Longest path of a unix socket on Linux (sun_path of 108 bytes with its end mark); macOS allows 103.
SOCKET_PATH_LIMIT = 103
#: Ray puts ``/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store`` below its folder.
RAY_SOCKET_SUFFIX = 64


class Service(StrEnum):
    """The supervised programs. The value is the name of the program and of its log."""

    PREFECT = "prefect"
    RAY = "ray"
    WORKER = "worker"

    @property
    def label(self) -> str:
        """The name for people."""
        return {"prefect": "Prefect server", "ray": "Ray head", "worker": "Prefect worker"}[self.value]


@dataclass(frozen=True)
class Layout:
    """Where the files of one stack are. ``home`` is absolute."""

    home: Path

    @property
    def identity(self) -> str:
        """Marks the processes of this stack: the same for the same folder, whatever state files were lost."""
        return hashlib.sha256(os.fsencode(self.home)).hexdigest()[:16]

    @property
    def prefect_home(self) -> Path:
        return self.home / "prefect"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def state_file(self) -> Path:
        return self.home / "stack.json"

    @property
    def lock_file(self) -> Path:
        return self.home / "stack.lock"

    @property
    def token_file(self) -> Path:
        return self.home / "ray-token"

    @property
    def supervisor_config(self) -> Path:
        return self.home / "supervisord.conf"

    @property
    def short_folder(self) -> Path:
        """Folder of the unix sockets: the home where their paths fit, else a private folder below /tmp."""
        if len(os.fsencode(self.home / "ray")) + RAY_SOCKET_SUFFIX <= SOCKET_PATH_LIMIT:
            return self.home
        return Path("/tmp") / f"rlhf-{self.identity}"

    @property
    def ray_folder(self) -> Path:
        return self.short_folder / "ray"

    @property
    def supervisor_socket(self) -> Path:
        return self.short_folder / "supervisor.sock"

    def log(self, service: Service) -> Path:
        return self.logs / f"{service.value}.log"

    def create(self) -> None:
        """Make the folders, readable by their owner only. ServiceError if one of them cannot be used."""
        try:
            for folder in (self.home, self.prefect_home, self.logs, self.short_folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.ray_folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ServiceError(f"cannot create the folder of the local services: {error}; set RLHF_HOME") from error
        info = self.short_folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
            # Somebody else's folder below /tmp could swap the sockets.
            raise ServiceError(
                f"{self.short_folder} is not a folder that only you can write: remove it, or set a short RLHF_HOME"
            )
