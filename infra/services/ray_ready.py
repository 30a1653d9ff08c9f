"""Waiting until a Ray head accepts drivers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from infra.services.errors import ServiceError
from infra.services.health import last_lines


class RayProbe:
    """A short-lived driver that looks for a living node; a context that ends it.

    It is a process of its own because Ray reads its environment once a process.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RayProbe:
        return self

    def found_node(self) -> bool:
        """Start the probe at the first call; later calls look whether it has come back with a node."""
        if self._process is None:
            command = [sys.executable, "-P", "-m", "infra.services.ray_probe"]
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        status = self._process.poll()
        if status is None or status == 0:
            return status == 0
        raise ServiceError(f"the Ray head accepts no driver. The end of {self._log}:\n{last_lines(self._log)}")

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
