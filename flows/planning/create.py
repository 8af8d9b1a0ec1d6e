"""Creates a run, or finds the one to resume, and refuses what would disturb a living run."""

import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flows.planning.resolve import read_sampler, short_name
from flows.progress import bar
from flows.supervision.life import CLOSED
from flows.supervision.processes import is_gone
from storage import layout
from storage.maintenance.resume_check import refuse_damage
from storage.objects.open_store import open_store
from storage.runs.control import change_state, is_state_known
from storage.runs.leases import SUPERVISOR, Lease, read_lease
from storage.runs.run import Run, default_root
from tba.config import Config, parse
from tba.errors import AlreadyExists, ConfigError, Damaged
from tba.runtime.waiting import looks


def start(config: Config, root: str | None, name: str | None, *, created_by: str = "") -> Run:
    """Create the run's folder; its name is derived from the task and the time if none is given."""
    root = root or default_root()
    name = name or f"{short_name(config.task.name)}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
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
        raise _taken(root, name) from None
    change_state(run, desired="run", searchers=config.search.searchers, why="started")
    return run


def refuse_taken(root: str | None, name: str | None) -> None:
    """What `start` would refuse of a name, without writing anything."""
    root = root or default_root()
    if name and open_store(layout.run_url(root, name)).exists(layout.RUN):
        raise _taken(root, name)


def _taken(root: str, name: str) -> ConfigError:
    return ConfigError(f"run {name!r} exists already under {root}; `tba resume {name}` continues it")


def resume(url: str) -> tuple[Run, Config]:
    """Ask an interrupted run to go on. ConfigError if somebody looks after it; Damaged, before anything is written, if
    something that its records admit is lost."""
    run = Run.open(url)
    config = parse(run.config)
    refuse_supervised(run, config)
    with bar("comparing what is stored with its records") as tell:
        refuse_damage(run, whole=True, progress=tell)
    given = {} if is_state_known(run) else {"searchers": config.search.searchers}  # it was created and no more
    change_state(run, desired="run", why="resumed", **given)
    return run, config


class LookedAfter(ConfigError):
    def __init__(self, run: Run, lease: Lease):
        super().__init__(
            f"run {run.name!r} is looked after already, by pid {lease.pid} on {lease.host}: `tba watch {run.url}` "
            "shows it; to go on under another supervisor, stop that one first"
        )
        self.run = run


def refuse_supervised(run: Run, config: Config) -> None:
    if lease := living_supervisor(run, config):
        raise LookedAfter(run, lease)


def living_supervisor(run: Run, config: Config) -> Lease | None:
    """A supervisor that lives renews its lease; one whose machine cannot be asked, or whose lease cannot be read, is
    watched for a moment."""
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
    """Return the lease of a supervisor that may live, or the error if it cannot be read; None if nobody supervises."""
    try:
        lease = read_lease(run, SUPERVISOR)
    except Damaged as damage:
        return damage
    return lease if lease and lease.status not in CLOSED and not is_gone(lease) else None


def _beat(lease: Lease | Damaged) -> tuple[int, int] | None:
    return (lease.life, lease.counter) if isinstance(lease, Lease) else None


def code_version() -> str:
    """The package's version where it is installed, and the commit where the code lies in a repository."""
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
