"""S3 servers and a Postgres for benchmarks and tests. Each listens on a free port of loopback, and is stopped by the
ids of the started processes."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import botocore.session

BUCKET = "tba-tests"
CEPH = Path(__file__).parent / "ceph.sh"
POSTGRES = Path("/usr/lib/postgresql")  # where Debian installs the versions of Postgres


class NotInstalled(Exception):
    """A server that this machine does not have; the message says how to get it."""


@dataclass(frozen=True)
class Server:
    endpoint: str
    key: str = "tbakey"
    secret: str = "tbasecret"

    def environment(self) -> dict[str, str]:
        """Return the environment by which a process reaches the server, without the user's own AWS configuration."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self) -> None:
        client = botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()


@contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """Start moto, a simulation of S3 in memory."""
    port = free_port()
    with _process([sys.executable, "-m", "benchmarks.harness.moto_server", "-p", str(port)], port, folder / "moto.log"):
        server = Server(f"http://127.0.0.1:{port}")
        server.make_bucket()
        yield server


def lacking_for_ceph() -> list[str]:
    return [tool for tool in ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin") if not shutil.which(tool)]


def s3(folder: Path) -> AbstractContextManager[Server]:
    """Start the real S3 server if it is installed, else the simulation."""
    return moto(folder) if lacking_for_ceph() else ceph(folder)


@contextmanager
def ceph(folder: Path, address: str = "127.0.0.1") -> Iterator[Server]:
    """Start a real S3 server: Ceph's RADOS gateway, with data in memory. Its keys are known, so `address` must be one
    that only this machine reaches."""
    if lacking := lacking_for_ceph():
        packages = "ceph-mon ceph-osd radosgw"
        raise NotInstalled(f"no {', '.join(lacking)} here: apt-get install --no-install-recommends {packages}")
    port, home = free_port(), folder / "ceph"
    try:
        command = [CEPH, "start", home, str(free_port()), str(port), str(os.getpid()), address]
        # The log is a file: the daemons inherit it, and a pipe would stay open as long as they live.
        with (folder / "ceph.log").open("w") as log:
            started = subprocess.run(command, stdout=log, stderr=log)
        if started.returncode:
            raise RuntimeError(f"benchmarks/harness/ceph.sh failed:\n{(folder / 'ceph.log').read_text()}")
        server = Server(f"http://{address}:{port}")
        server.make_bucket()
        yield server
    finally:
        subprocess.run([CEPH, "stop", home], check=True)


@contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """Start `rclone serve s3`, which accepts conditional writes but ignores the condition."""
    port, data = free_port(), folder / "rclone"
    (data / BUCKET).mkdir(parents=True)
    server = Server(f"http://127.0.0.1:{port}")
    tool = Path(sys.executable).parent / "rclone"
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{server.key},{server.secret}"]
    with _process([str(tool), "serve", "s3", *address, str(data)], port, folder / "rclone.log"):
        yield server


@contextmanager
def postgres() -> Iterator[str]:
    """Start a real Postgres, and yield the URL of an empty database in the form of Prefect's server."""
    tools = max(POSTGRES.glob("*/bin/initdb"), default=POSTGRES / "initdb", key=lambda it: int(it.parts[-3])).parent
    if not (tools / "initdb").exists():
        raise NotInstalled("no Postgres here: apt-get install --no-install-recommends postgresql")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tba-postgres-") as folder:
        as_whom: list[str] = []
        if os.getuid() == 0:  # Postgres refuses to run as root
            as_whom = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
            shutil.chown(folder, "postgres")
        data, log = Path(folder) / "data", Path(folder) / "log"
        make = [*as_whom, tools / "initdb", "-D", data, "-U", "prefect", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run([*make, "--locale=C"], check=True, capture_output=True, cwd=folder)
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [*as_whom, str(tools / "postgres"), "-D", str(data), "-p", str(port), *options]
        with _process(command, port, log, end=signal.SIGQUIT):
            yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"


def free_port() -> int:
    """Return a free port below the system's ephemeral ports, so that no other process gets it before its use. The
    choice does not depend on the seed of `random`: two test runs with the same seed would choose the same port."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def _process(command: Sequence[str], port: int, log: Path, *, end: signal.Signals = signal.SIGKILL) -> Iterator[None]:
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _await_port(process, port, log)
            yield
        finally:
            process.send_signal(end)


def _await_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
            continue
        return
    raise RuntimeError(f"{process.args} did not come up:\n{log.read_text()}")
