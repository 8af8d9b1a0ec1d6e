"""Create a run, or open a run to resume it. A run that a supervisor already looks after is refused."""

import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flows.planning.resolve import read_sampler, short_name
from flows.progress import bar
from flows.supervision.interfaces import CLOSED
from flows.supervision.processes import is_gone
from storage import layout
from storage.local_files.scratch import remove_left
from storage.maintenance.resume_check import refuse_damage
from storage.objects.open_store import open_store
from storage.runs.control import change_state, is_state_known
from storage.runs.leases import SUPERVISOR, Lease, read_lease
from storage.runs.run import Run, default_root
from tba.config import Config, parse
from tba.errors import AlreadyExists, ConfigError, Damaged
from tba.runtime.waiting import looks


def start(config: Config, root: str | None, name: str | None, *, created_by: str = "", task: str = "") -> Run:
    """Store a new run, which a supervisor can then start. Without a name, its name is made of the time and `task`, the
    name of the task or preset that was asked for. Raise ConfigError if a run of this name exists."""
    root = root or default_root()
    remove_left_scratch(root)
    name = name or f"{short_name(task or config.task.name)}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    sampler = read_sampler(config)
    try:
        run = Run.create(
            root,
            name,
            config=config.to_dict(),
            sampler_sql=sampler,
            code_version=code_version(),
            created_by=created_by,
        )
    except AlreadyExists:
        raise _exists_error(root, name) from None
    change_state(run, desired="run", searchers=config.search.searchers, why="started")
    return run


def remove_left_scratch(root: str) -> None:
    """Remove what killed trainers of this machine have left in the runs under a root, if it is on a local disk. A run
    that is resumed does this by itself."""
    runs = open_store(root.rstrip("/")).local_path(layout.RUNS.rstrip("/"))
    for record in runs.glob(f"*/{layout.RUN}") if runs else ():
        remove_left(record.parent)


def refuse_existing(root: str | None, name: str | None) -> None:
    """Raise ConfigError if `start` would refuse this name because a run has it. Write nothing."""
    root = root or default_root()
    if name and open_store(layout.run_url(root, name)).exists(layout.RUN):
        raise _exists_error(root, name)


def _exists_error(root: str, name: str) -> ConfigError:
    return ConfigError(f"run {name!r} exists already under {root}: choose another --name, or `tba resume {name}`")


def resume(url: str) -> tuple[Run, Config]:
    """Set the wanted state of an interrupted run to running, and return the run with its settings. Raise
    AlreadySupervised if a supervisor already looks after the run. Raise Damaged, before anything is written, if
    admitted shards or the prompts are lost or damaged."""
    run = Run.open(url)
    config = parse(run.config)
    refuse_supervised(run, config)
    with bar("comparing stored objects with their records") as tell:
        refuse_damage(run, whole=True, progress=tell)
    # Without a stored state, the run was created and never started.
    missing = {} if is_state_known(run) else {"searchers": config.search.searchers}
    change_state(run, desired="run", why="resumed", **missing)
    return run, config


class AlreadySupervised(ConfigError):
    """Another supervisor that is alive looks after the run."""

    def __init__(self, run: Run, lease: Lease):
        super().__init__(
            f"run {run.name!r} already has a supervisor, pid {lease.pid} on {lease.host}: watch it with `tba watch "
            f"{run.url}`, or stop that supervisor before you start another"
        )
        self.run = run


def refuse_supervised(run: Run, config: Config) -> None:
    if lease := living_supervisor(run, config):
        raise AlreadySupervised(run, lease)


def living_supervisor(run: Run, config: Config) -> Lease | None:
    """Return the lease of the run's supervisor if the supervisor is alive, else None. A lease does not show this by
    itself: the process may run on another machine, and the lease may be unreadable. So wait for up to three renewal
    periods for the lease to be renewed."""
    before: Lease | Damaged | None = None
    for _ in looks(3 * config.limits.lease_every, every=0.2):
        lease = _supervisor(run)
        if lease is None:
            return None
        before = before or lease
        if isinstance(lease, Lease) and _beat(lease) != _beat(before):
            return lease
    return None


def _supervisor(run: Run) -> Lease | Damaged | None:
    """Return the lease of a supervisor that may be alive, the error if the lease cannot be read, or None if the run has
    no supervisor."""
    try:
        lease = read_lease(run, SUPERVISOR)
    except Damaged as damage:
        return damage
    return lease if lease and lease.status not in CLOSED and not is_gone(lease) else None


def _beat(lease: Lease | Damaged) -> tuple[int, int] | None:
    return (lease.life, lease.counter) if isinstance(lease, Lease) else None


def code_version() -> str:
    """Return the version of the installed package and the commit of the Git repository that holds the code; either may
    be missing."""
    here, installed = Path(__file__).parent, ""
    with suppress(PackageNotFoundError):
        installed = version("tba")
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return installed
    return f"{installed} {commit.stdout.strip()}".strip()
