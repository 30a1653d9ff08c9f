"""The services that a training run talks to, and the environment that makes its libraries find them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Variables that would lead past the local services.
_PREFECT_STRAY = ("PREFECT_PROFILE", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING")
_RAY_STRAY = ("RAY_AUTH_TOKEN",)  # goes before the token file
_RAY_VARIABLES = ("RAY_", "VLLM_")


@dataclass(frozen=True)
class Session:
    """Where a run is driven and watched."""

    ui_url: str
    local: bool
    """Whether one of the services is a local one, which stays up until `rlhf down`."""


def open_session(say: Callable[[str], None]) -> Session:
    """Use the servers that PREFECT_API_URL and RAY_ADDRESS name; bring up local ones for what they do not name.

    Sets this process's environment, so it must run before Prefect and Ray are imported: both read it only once.
    ServiceError names a local service that does not start. ``say`` gets one line before a long wait.
    """
    from infra.services import Service, ServiceStack
    from infra.settings import load_settings

    settings = load_settings()
    api_url, ray_address = settings.prefect_api_url or "", settings.ray_address or ""
    wanted = [
        *([] if api_url else [Service.PREFECT]),
        *([] if ray_address else [Service.RAY]),
        *([] if api_url or ray_address else [Service.WORKER]),
    ]
    if wanted:
        stack = ServiceStack(settings.home)
        if not stack.status().running:
            say(f"starting {' and '.join(s.label for s in wanted if s is not Service.WORKER)} below {settings.home}")
        addresses = stack.up(services=wanted)
        foreign = ("PREFECT_",) if api_url else _RAY_VARIABLES if ray_address else ()
        stray = (*(() if api_url else _PREFECT_STRAY), *(() if ray_address else _RAY_STRAY))
        variables = {key: value for key, value in addresses.environment.items() if not key.startswith(foreign)}
        _set_environment(variables, stray)
        api_url = api_url or addresses.prefect_api_url
    return Session(ui_url=_ui_url(api_url), local=bool(wanted))


def _ui_url(api_url: str) -> str:
    return api_url.rstrip("/").removesuffix("/api")


def _set_environment(variables: Mapping[str, str], stray: tuple[str, ...]) -> None:
    from infra.settings import inherited_environment

    now = inherited_environment()
    changed = [key for key, value in variables.items() if now.get(key) != value]
    loaded = [name for name in ("prefect", "ray") if name in sys.modules]
    if changed and loaded:
        raise RuntimeError(f"{' and '.join(loaded)} imported before the environment was set ({', '.join(changed)})")
    for name in stray:
        os.environ.pop(name, None)
    os.environ.update(variables)
