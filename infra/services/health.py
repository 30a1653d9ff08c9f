"""Is a service really there?"""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from urllib.parse import urlsplit

_LOG_LINES = 20
_LOG_BYTES = 64 * 1024


def answers_http(url: str, timeout: float = 2.0) -> bool:
    """Whether a GET of the URL gives 200. Proxies are not used."""
    parts = urlsplit(url)
    if not parts.hostname:
        return False
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def prefect_answers(api_url: str, timeout: float = 2.0) -> bool:
    """Whether the Prefect API at ``http://host:port/api`` is healthy."""
    return answers_http(f"{api_url.rstrip('/')}/health", timeout)


def accepts_connections(address: str, timeout: float = 2.0) -> bool:
    """Whether something listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout):
            return True
    except OSError:
        return False


def last_lines(path: Path) -> str:
    """The end of a log, or a word about why there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join(text.rstrip().splitlines()[-_LOG_LINES:]) or "(the log is empty)"
