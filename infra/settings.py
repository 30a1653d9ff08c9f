"""What the environment says. This module is the only reader of ``os.environ``.

Credentials and switches of libraries (``AWS_*``, ``HF_HUB_OFFLINE``, ``CUDA_VISIBLE_DEVICES``) are read by these
libraries themselves and do not appear here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where the services are and where local files go. An empty variable counts as unset."""

    # Only the aliases are read: by its own name, `home` would be the variable HOME.
    model_config = SettingsConfigDict(env_ignore_empty=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    prefect_api_url: str | None = Field(default=None, validation_alias="PREFECT_API_URL")
    """API of the Prefect server, as ``http://host:port/api``; None means that the local services are used."""
    ray_address: str | None = Field(default=None, validation_alias="RAY_ADDRESS")
    """Address of the Ray cluster, as ``host:port``; None means that the local services are used."""
    home: Path = Field(default=Path(".rlhf"), validation_alias="RLHF_HOME", validate_default=True)
    """Folder of the local services and of the default store; absolute after loading."""

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().resolve()


#: What programs expect of any shell: where things are, how to speak, and how to reach the network.
_SHELL = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
    ),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)


def load_settings() -> Settings:
    """The settings as the environment gives them now."""
    return Settings()


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, as the base of a child's."""
    return dict(os.environ)


def shell_environment(names: Iterable[str]) -> dict[str, str]:
    """The variables that any program expects, ``LC_*`` with them, and those of ``names``; what is not set is left out.

    No GPU can be seen unless a name says so: the GPUs belong to the policy.
    """
    wanted = {*_SHELL, *names}
    found = {name: value for name, value in os.environ.items() if name in wanted or name.startswith("LC_")}
    return {"CUDA_VISIBLE_DEVICES": ""} | found
