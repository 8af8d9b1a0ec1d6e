"""Leases: how a role says that it lives, and how it hears what is wanted of it.

A lease is one object per role, renewed in the background by compare-and-swap. Each life of a role counts one up from
the last, so an older incarnation notices at its next renewal that it has been superseded. Nobody compares clocks of
two machines: a watcher judges by its own monotonic clock since the counter last changed.
"""

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, Self

from storage import layout
from storage.objects import records
from storage.objects.damage import LookingAt
from storage.runs import control, lives
from storage.runs.events import Events
from storage.runs.free_space import fullest_disk
from storage.runs.run import Run
from tba.errors import Conflict, Damaged, Stopped, StorageError, Superseded

log = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
DAMAGED = "lease-damaged"
"""The kind of the event, and of the alarm, that tells of a lease which cannot be read."""
_LATELY = 600.0  # seconds for which the longest time between two looks at what is wanted counts


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
    hears_every: float = 0.0  # seconds: the longest time lately between two looks of the role at what is wanted
    disk_gb: float | None = None  # left on the fullest of the disks that it writes to
    disk: str = ""  # which: a folder on it


def read_lease(run: Run, role: str) -> Lease | None:
    """Return the lease of a role, None if nobody ever held one. Damaged, naming the object, if it cannot be read."""
    found = run.store.read_tagged(layout.lease(role))
    return decode_lease(run, layout.lease(role), found[0]) if found else None


def readable_lease(run: Run, role: str) -> Lease | None:
    """Return the lease of a role, None also where it is damaged: then nobody is known to hold it."""
    try:
        return read_lease(run, role)
    except Damaged:
        return None


class HeldLease:
    """The `Lease` of a role that is running. Held from the moment it is made; `close`, or leaving the context, gives
    it back. A thread renews it every `every` seconds and goes on through any trouble with the store; what it learns
    is raised by `check` in the caller's thread. A searcher says by `index` which one it is, and hears when it is one
    too many.

    A lease that cannot be read is replaced, with an event that names it: when it is claimed, under a life beyond every
    known one; while it is held, under the same life."""

    def __init__(
        self, run: Run, role: str, *, every: float, orphan_after: float | None = None, index: int | None = None
    ):
        self.run = run
        self.every = every
        self._index = index
        self._key = layout.lease(role)
        self._silence = _Silence(run, orphan_after) if orphan_after else None
        self._verdict: Superseded | Stopped | None = None
        self.repairs: deque[str] = deque()  # what was told of leases that were replaced because of damage
        self._lock = threading.Lock()  # of the lease and its tag, and so of every renewal
        self._said: tuple[str, dict[str, float]] = ("starting", {})
        self._heard = time.monotonic()  # when the role itself last spoke
        self._hearing = _Hearing()
        self._state: control.State | None = None  # as it was read last
        self._closing = threading.Event()
        self._lease, self._tag = self._claim(role)
        self._listen_first()
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
        self._hearing.add(self._heard)
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
            life, damage = _next_life(self.run, role, found[0] if found else None)
            lease = Lease(
                role=role,
                life=life,
                host=socket.gethostname(),
                pid=os.getpid(),
                counter=0,
                status="starting",
                renewed_at=records.now(),
                supervised=self._silence is not None,
            )
            try:
                tag = self.run.store.replace(self._key, _encode(lease), tag=found[1] if found else None)
            except Conflict:
                continue  # the life before this one was just renewing it
            if damage:
                self._tell_repair(lease, f"{damage}: life {life} has replaced it, and whoever held it ends")
            return lease, tag

    def _tell_repair(self, lease: Lease, message: str) -> None:
        self.repairs.append(message)
        events = Events(self.run, lease.role, lease.life, logs=lease.role != SUPERVISOR)  # which tells by itself
        events.write(DAMAGED, message, severity="warning")

    def _listen_first(self) -> None:
        """Hear what is wanted. Where that cannot be read, a role that has a supervisor begins all the same, for the
        supervisor restores it; anybody else gives the lease back and says why."""
        try:
            self._listen()
        except StorageError as error:
            if self._silence and isinstance(error, Damaged):
                log.warning("%s: %s", self.role, error)
                return
            self._closing.set()
            self.tell("failed")
            self._try(self._renew)
            raise

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
                hears_every=round(self._hearing.longest(), 1),
                **fullest_disk(self.run),
            )
            try:
                self._tag = self.run.store.replace(self._key, _encode(lease), tag=self._tag)
            except Conflict:
                self._look_who_was_first(lease)
            else:
                self._lease = lease

    def _look_who_was_first(self, renewed: Lease) -> None:
        """Find out why a renewal was refused. Another life may have taken the lease; this one may have renewed it
        itself, by a request that was given up and arrived all the same; or the lease was damaged, or put back to an
        older life: then it is written again. The highest life keeps it."""
        found = self.run.store.read_tagged(self._key)
        if found is None:
            return self._give_way()
        try:
            other = decode_lease(self.run, self._key, found[0])
        except Damaged as damage:
            if lives.newest_with_events(self.run, self.role) > self.life:
                return self._give_way()
            return self._take_back(renewed, found[1], str(damage))
        if (other.life, other.host, other.pid) == (self.life, self._lease.host, self._lease.pid):
            self._lease, self._tag = other, found[1]
        elif other.life < self.life:
            self._take_back(renewed, found[1], f"{self.run.url}/{self._key} is of life {other.life}, which is over")
        else:
            self._give_way()

    def _give_way(self) -> None:
        self._verdict = Superseded(f"another {self.role} has taken over {self.run.url}")

    def _take_back(self, renewed: Lease, tag: str, damage: str) -> None:
        """Write the lease again. If another writer comes first here too, the next renewal looks again."""
        with suppress(Conflict):
            self._tag = self.run.store.replace(self._key, _encode(renewed), tag=tag)
            self._lease = renewed
            self._tell_repair(renewed, f"{damage}: {self.role}, which holds it, has written it again")

    def _listen(self) -> None:
        """Hear what is wanted: the run's state, then whether anybody still supervises."""
        if self._verdict:
            return
        damage: Damaged | None = None
        try:
            self._state = control.keep_state(self.run, self._state)
            self._hear(self._state or control.State())
        except Damaged as error:
            damage = error
        if self._silence and not self._verdict:
            seconds = self._silence.measure()
            if seconds is not None:
                self._verdict = Stopped(f"{self.role} has seen no supervisor for {seconds:.0f} s")
        if damage:
            raise damage

    def _hear(self, state: control.State) -> None:
        if state.desired == "stop":
            self._verdict = Stopped(f"{self.run.name} was asked to stop{f': {state.why}' if state.why else ''}")
        elif self._index is not None and self._index >= state.searchers:
            self._verdict = Stopped(f"{self.role} is one too many of {state.searchers}")


class _Hearing:
    """How much time passes between two looks of a role at what is wanted, and so until it hears that it is to stop."""

    def __init__(self) -> None:
        self._last: float | None = None  # none before the first look: to start takes longer than anything later
        self._gaps: deque[tuple[float, float]] = deque()  # when each ended, and its seconds; each longer than the next
        self._lock = threading.Lock()  # several threads of a role may look

    def add(self, now: float) -> None:
        with self._lock:
            gap, self._last = now - (self._last or now), now
            while self._gaps and self._gaps[-1][1] <= gap:
                self._gaps.pop()
            self._gaps.append((now, gap))
            while self._gaps[0][0] < now - _LATELY:
                self._gaps.popleft()

    def longest(self) -> float:
        with self._lock:
            return self._gaps[0][1] if self._gaps else 0.0


class _Silence:
    """How long no supervisor has been seen."""

    def __init__(self, run: Run, limit: float):
        self.run = run
        self.limit = limit
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()

    def measure(self) -> float | None:
        """Seconds of silence, if they are too many. A store that cannot be read says nothing about supervisors, so
        the time starts anew. A damaged lease is silence: a supervisor that lives would write it again."""
        try:
            lease = readable_lease(self.run, SUPERVISOR)
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
        self._last: dict[tuple[str, str], Lease] = {}
        self.damaged: dict[str, str] = {}  # why a role's lease cannot be read, as of the last look

    def observe(self, run: Run) -> dict[str, Seen]:
        """Every role that ever held a lease, and for how long it has been silent. A lease that cannot be read counts
        as one that does not move, since whoever holds it writes it again: it is shown as it was read last."""
        seen: dict[str, Seen] = {}
        found = read_roles(run)
        self.damaged = dict(found.damaged)
        for lease in [*found.leases, *(self._as_last_read(run, role) for role in found.damaged)]:
            who, beat, now = (run.url, lease.role), (lease.life, lease.counter), time.monotonic()
            self._last[who] = lease
            before = self._changed.get(who)
            if before is None or before[0] != beat:
                self._changed[who] = before = (beat, now)
            seen[lease.role] = Seen(lease, now - before[1])
        return seen

    def _as_last_read(self, run: Run, role: str) -> Lease:
        """Return the lease as this watcher read it last. If it never could, return one of an unknown holder, with the
        newest life that events tell of."""
        return self._last.get((run.url, role)) or Lease(
            role=role,
            life=lives.newest_with_events(run, role),
            host="an unknown machine",
            pid=0,
            counter=-1,
            status="its lease cannot be read",
            renewed_at=records.now(),
            supervised=False,
        )


class Leases(NamedTuple):
    leases: list[Lease]  # by role
    damaged: dict[str, str]  # by role, what is wrong with those that cannot be read


def read_leases(run: Run, looking_at: LookingAt | None = None) -> list[Lease]:
    """Return the leases of all roles, by role, but for those that cannot be read. `looking_at` hears of those."""
    found = read_roles(run)
    if looking_at:
        for role, problem in found.damaged.items():
            with looking_at(layout.lease(role)):
                raise Damaged(problem)
    return found.leases


def read_roles(run: Run) -> Leases:
    """Return the leases of all roles; a damaged one hides no other."""
    found = Leases([], {})
    keys = {entry.key: role for entry in run.store.list(layout.ROLES) if (role := layout.parse_lease(entry.key))}
    for (key, role), data in zip(keys.items(), run.store.read_many(list(keys)), strict=True):
        try:
            found.leases.append(decode_lease(run, key, data))
        except Damaged as damage:
            found.damaged[role] = str(damage)
    return found


def decode_lease(run: Run, key: str, data: bytes) -> Lease:
    """The lease in `data`; Damaged, naming the object and what is wrong, unless it is one of the role it is named
    after."""
    required = ("role", "life", "host", "pid", "counter", "status", "renewed_at", "supervised")
    record = records.decode(data, f"{run.url}/{key}", *required)
    try:
        lease = records.known(Lease, {**record, "progress": _numbers(record.get("progress", {}))})
        _check(lease, layout.parse_lease(key))
    except (OverflowError, TypeError, ValueError) as error:
        raise Damaged(f"{run.url}/{key} is not a lease: {error}") from None
    return lease


def _check(lease: Lease, role: str | None) -> None:
    """ValueError unless the values can be those of a lease."""
    if lease.role != role:
        raise ValueError(f"role is {lease.role!r}")
    if not 0 < lease.life < lives.MOST_LIVES:
        raise ValueError(f"life is {lease.life}")
    disk_gb = 0.0 if lease.disk_gb is None else lease.disk_gb
    for name, value in {**vars(lease), "disk_gb": disk_gb}.items():
        if name in ("counter", "pid", "quiet", "hears_every", "disk_gb") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}")
    if datetime.fromisoformat(lease.renewed_at).tzinfo is None:
        raise ValueError(f"renewed_at has no time zone: {lease.renewed_at!r}")


def _numbers(progress: Any) -> dict[str, float]:
    """Return what a role says of its progress, without numbers that were not finite and so were stored as null."""
    if not isinstance(progress, dict):
        raise TypeError(f"progress is of type {type(progress).__name__}")
    for name, value in progress.items():
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"progress has {name}={value!r}")
    return {name: value for name, value in progress.items() if value is not None}


def _next_life(run: Run, role: str, data: bytes | None) -> tuple[int, str]:
    """Return the number of the next life of a role, and what is wrong with its lease if that cannot be read."""
    if data is None:
        return lives.newest_with_events(run, role) + 1, ""
    try:
        return decode_lease(run, layout.lease(role), data).life + 1, ""
    except Damaged as damage:
        return lives.next_after_damage(run, role, data), str(damage)


def _encode(lease: Lease) -> bytes:
    return records.encode(asdict(lease))
