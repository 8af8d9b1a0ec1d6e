"""Leases: how a role says that it lives, and how it hears what is wanted of it.

A lease is one object per role, renewed in the background by compare-and-swap. Each life of a role counts one up from
the last, so an older incarnation notices at its next renewal that it has been superseded. Nobody compares clocks of
two machines: a watcher judges by its own monotonic clock since the counter last changed.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import NamedTuple, Self

from storage import control, layout, records
from storage.damage import LookingAt, raising
from storage.disks import fullest_disk
from storage.run import Run
from tba.errors import Conflict, Damaged, Stopped, StorageError, Superseded

log = logging.getLogger(__name__)

SUPERVISOR = "supervisor"


@dataclass(frozen=True, kw_only=True)
class Lease:
    role: str
    life: int
    host: str
    pid: int
    counter: int
    status: str
    progress: dict[str, float] = field(default_factory=dict)
    renewed_at: str
    supervised: bool  # stops by itself when no supervisor is left
    quiet: float = 0.0  # seconds since the role itself, not only the thread that renews, gave a sign of life
    disk_gb: float | None = None  # left on the fullest of the disks that it writes to
    disk: str = ""  # which: a folder on it


def read_lease(run: Run, role: str) -> Lease | None:
    found = run.store.read_tagged(layout.lease(role))
    return _decode(run, layout.lease(role), found[0]) if found else None


class HeldLease:
    """The `Lease` of a role that is running. Held from the moment it is made; `close`, or leaving the context, gives
    it back. A thread renews it every `every` seconds and goes on through any trouble with the store; what it learns
    is raised by `check` in the caller's thread. A searcher says by `index` which one it is, and hears when it is one
    too many."""

    def __init__(
        self, run: Run, role: str, *, every: float, orphan_after: float | None = None, index: int | None = None
    ):
        self.run = run
        self.every = every
        self._index = index
        self._key = layout.lease(role)
        self._silence = _Silence(run, orphan_after) if orphan_after else None
        self._verdict: Superseded | Stopped | None = None
        self._lock = threading.Lock()  # of the lease and its tag, and so of every renewal
        self._said: tuple[str, dict[str, float]] = ("starting", {})
        self._heard = time.monotonic()  # when the role itself last spoke
        self._closing = threading.Event()
        self._lease, self._tag = self._claim(role)
        self._listen()
        self._thread = threading.Thread(target=self._keep, name=f"lease of {role}", daemon=True)
        self._thread.start()

    @property
    def role(self) -> str:
        return self._lease.role

    @property
    def life(self) -> int:
        return self._lease.life

    def tell(self, status: str, **progress: float) -> None:
        """What the next renewals say."""
        self._said = (status, progress)
        self._heard = time.monotonic()

    def check(self) -> None:
        """Raises what the role has to hear; also its sign that it is not stuck."""
        self._heard = time.monotonic()
        if self._verdict:
            raise self._verdict
        if not self._thread.is_alive() and not self._closing.is_set():
            raise StorageError(f"{self.run.url}/{self._key} is no longer renewed: its thread has died")

    def stop(self, why: str) -> None:
        """Stop as if the run had been asked to. Takes no lock: it may be called by a signal handler."""
        self._verdict = self._verdict or Stopped(f"{self.role} was asked to stop: {why}")

    def close(self, status: str = "stopped") -> None:
        """Say a last word and stop renewing. Never raises for trouble with the store; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.tell(status, **self._said[1])
        self._thread.join(self.every)
        if not isinstance(self._verdict, Superseded):
            self._try(self._renew)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("stopped" if kind is None or issubclass(kind, (Stopped, Superseded)) else "failed")

    def _claim(self, role: str) -> tuple[Lease, str]:
        while True:
            found = self.run.store.read_tagged(self._key)
            lease = Lease(
                role=role,
                life=_decode(self.run, self._key, found[0]).life + 1 if found else 1,
                host=socket.gethostname(),
                pid=os.getpid(),
                counter=0,
                status="starting",
                renewed_at=records.now(),
                supervised=self._silence is not None,
            )
            try:
                return lease, self.run.store.replace(self._key, _encode(lease), tag=found[1] if found else None)
            except Conflict:
                continue  # the life before this one was just renewing it

    def _keep(self) -> None:
        while not self._closing.wait(self.every) and not isinstance(self._verdict, Superseded):
            self._try(self._renew)
            self._try(self._listen)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except StorageError as error:
            log.warning("%s: %s", self.role, error)

    def _renew(self) -> None:
        status, progress = self._said
        with self._lock:
            lease = replace(
                self._lease,
                counter=self._lease.counter + 1,
                status=status,
                progress=progress,
                renewed_at=records.now(),
                quiet=round(time.monotonic() - self._heard, 1),
                **fullest_disk(self.run),
            )
            try:
                self._tag = self.run.store.replace(self._key, _encode(lease), tag=self._tag)
            except Conflict:
                self._look_who_was_first()
            else:
                self._lease = lease

    def _look_who_was_first(self) -> None:
        """Another life, or this one: a renewal that was given up at the deadline may have arrived all the same."""
        found = self.run.store.read_tagged(self._key)
        lease = _decode(self.run, self._key, found[0]) if found else None
        if found and lease and lease.life == self.life:
            self._lease, self._tag = lease, found[1]
        else:
            self._verdict = Superseded(f"another {self.role} has taken over {self.run.url}")

    def _listen(self) -> None:
        """Hear what is wanted: the run's state, then whether anybody still supervises."""
        if self._verdict:
            return
        state = control.read_state(self.run)
        if state.desired == "stop":
            self._verdict = Stopped(f"{self.run.name} was asked to stop{f': {state.why}' if state.why else ''}")
        elif self._index is not None and self._index >= state.searchers:
            self._verdict = Stopped(f"{self.role} is one too many of {state.searchers}")
        elif self._silence:
            seconds = self._silence.measure()
            if seconds is not None:
                self._verdict = Stopped(f"{self.role} has seen no supervisor for {seconds:.0f} s")


class _Silence:
    """How long no supervisor has been seen."""

    def __init__(self, run: Run, limit: float):
        self.run = run
        self.limit = limit
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()

    def measure(self) -> float | None:
        """Seconds of silence, if they are too many. A store that cannot be read says nothing about supervisors, so
        the time starts anew."""
        try:
            lease = read_lease(self.run, SUPERVISOR)
        except StorageError:
            self._since = time.monotonic()
            raise
        now = time.monotonic()
        seen = (lease.life, lease.counter) if lease else None
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since if now - self._since > self.limit else None


class Seen(NamedTuple):
    lease: Lease
    silent_for: float  # seconds since this watcher saw the lease change


class LeaseWatch:
    """Watches the leases of a run."""

    def __init__(self) -> None:
        self._changed: dict[tuple[str, str], tuple[tuple[int, int], float]] = {}

    def observe(self, run: Run) -> dict[str, Seen]:
        """Every role that ever held a lease, and for how long it has been silent."""
        seen: dict[str, Seen] = {}
        for lease in read_leases(run):
            who, beat, now = (run.url, lease.role), (lease.life, lease.counter), time.monotonic()
            before = self._changed.get(who)
            if before is None or before[0] != beat:
                self._changed[who] = before = (beat, now)
            seen[lease.role] = Seen(lease, now - before[1])
        return seen


def read_leases(run: Run, looking_at: LookingAt | None = None) -> list[Lease]:
    """By role. `looking_at` decides what becomes of a damaged record: Damaged is raised unless it says otherwise."""
    found: list[Lease] = []
    for key, read in records.read_each(run.store, [entry.key for entry in run.store.list(layout.ROLES)]):
        with (looking_at or raising(run.url))(key):
            found.append(_decode(run, key, read()))
    return found


def _encode(lease: Lease) -> bytes:
    return records.encode(asdict(lease))


def _decode(run: Run, key: str, data: bytes) -> Lease:
    try:
        lease = records.known(Lease, records.decode(data, f"{run.url}/{key}"))
        datetime.fromisoformat(lease.renewed_at)
        return lease
    except (TypeError, ValueError) as error:
        raise Damaged(f"{run.url}/{key} is not a lease: {error}") from None
