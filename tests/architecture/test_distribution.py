"""What is installed and deployed: the wheel, the four top-level names, the deployments, the pins."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.doctor import DISTRIBUTION

PACKAGES = ("flows", "infra", "rlhf_core", "tasks")


@pytest.fixture(scope="module")
def wheel(project_files, root, tmp_path_factory) -> set[str]:
    """Names in the wheel that is built from the project's files, without its metadata."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in project_files:
        if file.parts[0] in PACKAGES or file.name in ("pyproject.toml", "README.md"):
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel, project_files):
    assert wheel == {file.as_posix() for file in project_files if file.parts[0] in PACKAGES}


def test_the_wheel_holds_presets_and_deployment_files(wheel):
    assert "infra/presets/laptop.toml" in wheel
    assert "infra/deploy/prefect-server.env" in wheel


def test_nobody_else_claims_our_names():
    claims = metadata.packages_distributions()
    others = {name: set(claims.get(name, ())) - {DISTRIBUTION} for name in PACKAGES}
    assert {name: claim for name, claim in others.items() if claim} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_our_names_are_ours(package, root):
    assert Path(import_module(package).__file__ or "").parent == root / package


def test_deployments_name_modules_not_files(root):
    # A file entrypoint is loaded under another name: a second flow object, and actors that no worker can import.
    text = (root / "prefect.yaml").read_text(encoding="utf-8")
    assert ".py:" not in text
    deployments = yaml.safe_load(text)["deployments"]
    assert deployments
    for deployment in deployments:
        assert re.fullmatch(r"flows(\.[a-z_]+)+", deployment["entrypoint"]), deployment["entrypoint"]


@pytest.fixture(scope="module")
def declared() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]


def pins(path: Path) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line]
    assert [str(r) for r in found if [s.operator for s in r.specifier] != ["=="]] == [], "every line is one exact pin"
    return {canonicalize_name(r.name): r for r in found}


@pytest.mark.parametrize(("lock", "extras"), [("cpu", ("cpu", "demo", "test")), ("gpu", ("gpu", "demo", "test"))])
def test_the_pins_lie_in_the_declared_ranges(lock, extras, declared, root):
    pinned = pins(root / "requirements" / f"{lock}.txt")
    for requirement in declared:
        applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras)
        pin = pinned.get(canonicalize_name(requirement.name))
        if applies and pin is not None:
            (exact,) = pin.specifier
            assert requirement.specifier.contains(exact.version, prereleases=True), f"{pin} is outside {requirement}"


def test_the_cpu_pins_are_all_that_is_needed(declared, root):
    pinned = pins(root / "requirements" / "cpu.txt")
    extras = ("cpu", "demo", "test")
    wanted = {
        canonicalize_name(r.name)
        for r in declared
        if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
    }
    assert wanted - pinned.keys() == set()
    assert {"torchvision", "torchaudio", "torchcodec"} & pinned.keys() == set(), "they break `import transformers`"


def test_the_command_is_installed():
    (command,) = metadata.entry_points(group="console_scripts", name="rlhf")
    assert command.load() is import_module("flows.cli.main").main
