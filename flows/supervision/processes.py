"""Run roles as processes of this host. Each process has a session of its own, and is killed with all its children.

A role may outlive its supervisor. So its output goes to a file and not to a pipe of the supervisor, and it holds its
own GPU locks. The next supervisor finds the role by its lease. This supervisor may kill the process of the lease only
if the process is certainly the role: it has the pid of the lease on the same host, started before the lease was last
renewed, and has the role's arguments.
"""

import hashlib
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal

from flows.supervision.gpus import Devices, HeldDevices
from storage import layout
from storage.local_files.shared_cache import cache_folder
from storage.runs.leases import Lease
from storage.runs.run import Run
from tba.errors import RunFailed
from tba.runtime.child import module_command

Kind = Literal["searcher", "trainer", "trainer-node", "evaluator"]
_KINDS: dict[str, Kind] = {"searcher": "searcher", "trainer": "trainer", "evaluator": "evaluator"}
Command = Callable[["Role", str], list[str]]

FINISHED, FAILED, MISUSED, SUPERSEDED, STOPPED, GAVE_UP = 0, 1, 2, 3, 4, 5  # exit codes of `python -m flows.roles.role`
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"  # role_keeper.py finds errors by this format
CLOCK_SLACK = 2.0  # seconds by which the times of a lease and of the process table may differ


class NotNow(Exception):
    """Raised when a role cannot be started at the moment; trying again later may succeed."""


@dataclass(frozen=True)
class Role:
    kind: Kind
    index: int = 0

    @property
    def name(self) -> str:
        return layout.role_name(self.kind, self.index)

    @classmethod
    def parse(cls, name: str) -> "Role | None":
        """Return the role with this lease name, or None if the name is not that of a role: a supervisor holds a lease
        too."""
        kind, _, index = name.partition("-")
        is_one = kind in _KINDS and (not index or (index.isascii() and index.isdigit()))
        return cls(_KINDS[kind], int(index or 0)) if is_one else None


def role_command(role: Role, run: str) -> list[str]:
    """Return the command that starts a role. `$TBA_ROLE_COMMAND` replaces its beginning, for example to use `numactl`,
    a profiler or a container."""
    begin = shlex.split(os.environ.get("TBA_ROLE_COMMAND", "")) or module_command("flows.roles.role")
    return [*begin, role.kind, "--run", run, "--index", str(role.index)]


class RoleProcess:
    """One life of a role, as a child of this process."""

    def __init__(self, run: Run, role: Role, number: int, *, command: Command, held: HeldDevices | None):
        self.run, self.role, self.number = run, role, number
        self.log = log_file(run, role, number)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command(role, run.url),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment() | (held.variables if held else {}),
                pass_fds=held.locks if held else (),
            )

    @property
    def where(self) -> str:
        return f"pid {self.process.pid}, log {self.log}"

    @property
    def waits_for(self) -> str:
        return ""

    def poll(self) -> int | None:
        """Return the exit code if the role has ended, negative for a signal, else None. Once the role has ended, kill
        what is left of its process group."""
        if self.process.returncode is not None:
            return self.process.returncode
        # WNOWAIT does not reap the process: until then no other process group can get its number.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_group(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def let_go(self) -> None:
        """Forget the process and leave it running."""
        if self.process.poll() is None:
            self.process.returncode = 0

    def last_words(self, lines: int = 20) -> str:
        return tail(self.log, lines)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            kill_group(self.process.pid, number)


class LocalLauncher:
    """Starts roles as processes of this host."""

    start_deadline = 300.0  # imports are slow on a busy machine
    end_grace = 5.0
    last_word_after = math.inf  # the exit of a process is always seen

    def __init__(self, run: Run, *, command: Command = role_command, devices: Devices | None = None):
        self.run, self.command = run, command
        self.devices = devices or Devices(run.url)
        self.stored: dict[str, int] = {}  # the size of each stored log when it was stored

    def start(self, role: Role, number: int) -> RoleProcess:
        held, wanted = self.devices.acquire(role.kind), self.devices.needed_by(role.kind)
        if self.devices.uuids and held is None:
            host = socket.gethostname()
            if wanted > 1:
                why = "engine.tensor_parallel" if wanted == self.devices.per_engine else "training.ranks"
                raise NotNow(f"it needs {wanted} GPUs ({why}), and other runs hold too many of those of {host}")
            raise NotNow(f"other runs hold every GPU of {host}")
        try:
            return RoleProcess(self.run, role, number, command=self.command, held=held)
        except (FileNotFoundError, PermissionError) as error:
            raise RunFailed(f"{role.name} cannot be started on {socket.gethostname()}: {error}") from None
        except OSError as error:  # too little memory or disk, too many processes: this may pass
            raise NotNow(f"{socket.gethostname()} cannot start a process: {error}") from error
        finally:
            if held:
                held.release()  # the role has its own copies

    def ended(self, life: RoleProcess) -> None:
        self._store(life.log)

    def close(self) -> None:
        """Upload each log of the run's roles that is on this host, including logs of roles that another supervisor
        started."""
        for path in log_file(self.run, Role("trainer"), 1).parent.glob("*.log"):
            self._store(path)

    def _store(self, log: Path) -> None:
        """Upload a log if the run is in remote storage and the log has changed since its last upload. Until then the
        log is only in this host's cache."""
        key = layout.LOGS + log.name
        if self.run.store.local_path(key) is None and self.stored.get(key) != (size := log.stat().st_size):
            self.run.store.upload(log, key)
            self.stored[key] = size


def last_life(run: Run, role: Role) -> int:
    """Return the number of the role's newest life that has a log on this host or in the run's storage; 0 if none."""
    names = [path.name for path in log_file(run, role, 1).parent.glob(f"{role.name}-*.log")]
    names += [Path(entry.key).name for entry in run.store.list(f"{layout.LOGS}{role.name}-")]
    matches = (re.fullmatch(rf"{re.escape(role.name)}-(\d+)\.log", name) for name in names)
    return max((int(match[1]) for match in matches if match), default=0)


def log_file(run: Run, role: Role, number: int) -> Path:
    """Return the path of a life's log: in the run's folder if that is on this host's disk, else in the cache."""
    key = layout.log(role.name, number)
    local = run.store.local_path(key)
    identity = hashlib.sha256(run.url.encode()).hexdigest()[:8]
    return local or cache_folder("logs") / f"{run.name}-{identity}" / Path(key).name


def tail(path: Path, lines: int) -> str:
    """Return the last lines of a file, taken from its last 16 kB."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    return ""


def kill_group(pid: int, number: signal.Signals) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_role(role: Role, lease: Lease, run: str, number: signal.Signals) -> bool:
    """Send a signal to the process group of a role that another supervisor started. Return False if no process of this
    host is certainly this role."""
    pid = process_of(lease, role, run)
    return pid is not None and kill_group(pid, number)


def process_of(lease: Lease, role: Role, run: str) -> int | None:
    """Return the pid in a lease if the process is certainly this role of this run, else None."""
    age = _age(lease.pid) if lease.host == socket.gethostname() else None
    if age is None or age + CLOCK_SLACK < _seconds_since(lease.renewed_at):
        return None
    try:
        leads = os.getpgid(lease.pid) == lease.pid
        arguments = Path(f"/proc/{lease.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    runs = [after for before, after in pairwise(arguments) if before == "--run"]
    is_role = role.kind in arguments and any(Path(url).name == run for url in runs)
    return lease.pid if leads and is_role else None


def is_gone(lease: Lease) -> bool:
    """Return True if the process of a lease has certainly ended: the lease is of this host, and the process with its
    pid does not exist or started after the lease was last renewed."""
    if lease.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return False
    age = _age(lease.pid)
    return age is None or age + CLOCK_SLACK < _seconds_since(lease.renewed_at)


def _age(pid: int) -> float | None:
    """Return how many seconds ago a process of this host started, or None if no such process is running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _seconds_since(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _environment() -> dict[str, str]:
    """Return the environment of a role: this process's environment without the variables of Prefect."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
