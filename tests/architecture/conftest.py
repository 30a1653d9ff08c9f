"""The project's own files, as the rules about them see it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "infra", "rlhf_core", "tasks")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def project_files() -> list[Path]:
    """Files that are tracked, or would be by the next ``git add``; relative to the root."""
    # The checkout may belong to another user than the one who runs the tests.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in sorted(set(listed.split("\0")) - {""})]
    return [file for file in files if (ROOT / file).is_file()]


@pytest.fixture(scope="session")
def modules(project_files) -> list[Path]:
    """The Python files of the four packages."""
    return [file for file in project_files if file.parts[0] in PACKAGES and file.suffix == ".py"]
