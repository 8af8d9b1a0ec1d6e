"""The lease of a running role: the role takes the lease under a new life, and a thread renews it in the background."""

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from storage import layout
from storage.local_files.free_space import fullest_disk
from storage.objects import records
from storage.runs import lives
from storage.runs.events import Events
from storage.runs.leases import DAMAGED, SUPERVISOR, Lease, decode_lease, encode_lease
from storage.runs.run import Run
from storage.runs.signs_of_life import SignsOfLife
from storage.runs.stop_reasons import StopReasons
from tba.errors import Conflict, Damaged, Stopped, StorageError, Superseded

log = logging.getLogger(__name__)


class HeldLease:
    """The lease that a running role holds; see `Lease` in tba/interfaces.py. The role holds the lease from the
    construction of this object until `close`, or until the context ends. A thread renews the lease every `every`
    seconds, and continues if the store fails. If the thread finds a reason to stop, `check` raises that reason in the
    caller's thread. `index` is the number of a searcher; a searcher stops if its number is no longer wanted.

    If the stored lease cannot be read, it is replaced, and an event names it. A role that takes a damaged lease gets a
    life number higher than every known one; a role that holds the lease keeps its life number."""

    def __init__(
        self, run: Run, role: str, *, every: float, orphan_after: float | None = None, index: int | None = None
    ):
        self.run = run
        self.every = every
        self.repairs: deque[str] = deque()  # messages about damaged leases that were replaced
        self._key = layout.lease(role)
        self._stop_reasons = StopReasons(run, role, index=index, orphan_after=orphan_after)
        self._superseded: Superseded | None = None
        self._lock = threading.Lock()  # guards `_lease` and `_tag`, so only one renewal runs at a time
        self._said: tuple[str, dict[str, float]] = ("starting", {})
        self._signs = SignsOfLife()
        self._closing = threading.Event()
        self._lease, self._tag = self._claim(role)
        self._look_first()
        self._thread = threading.Thread(target=self._keep, name=f"lease of {role}", daemon=True)
        self._thread.start()

    @property
    def role(self) -> str:
        return self._lease.role

    @property
    def life(self) -> int:
        return self._lease.life

    def tell(self, status: str, **progress: float) -> None:
        """Set the status and the progress that the next renewals write."""
        self._said = (status, progress)
        self._signs.give()

    def tell_status(self, status: str) -> None:
        """Set the status alone, and keep the progress."""
        self.tell(status, **self._said[1])

    def check(self) -> None:
        """Raise the reason why the role has to stop, if there is one. Each call is a sign that the role is not
        stuck."""
        self._signs.give_by_look()
        if verdict := self._superseded or self._stop_reasons.reason:
            raise verdict
        if not self._thread.is_alive() and not self._closing.is_set():
            raise StorageError(f"{self.run.url}/{self._key} is no longer renewed: its renewal thread has died")

    def stop(self, why: str) -> None:
        """Make the role stop as if its run had been asked to stop. This method takes no lock, so a signal handler may
        call it."""
        self._stop_reasons.ask(why)

    def renew(self) -> None:
        """Renew the lease at once, with the status and the progress of the last `tell`."""
        status, progress = self._said
        with self._lock:
            lease = replace(
                self._lease,
                counter=self._lease.counter + 1,
                status=status,
                progress=progress,
                renewed_at=records.now(),
                quiet=round(self._signs.quiet(), 1),
                hears_every=round(self._signs.longest_gap(), 1),
                **fullest_disk(self.run.folder),
            )
            try:
                self._tag = self.run.store.replace(self._key, encode_lease(lease), tag=self._tag)
            except Conflict:
                self._look_who_was_first(lease)
            else:
                self._lease = lease

    def close(self, status: str = "stopped") -> None:
        """Write a last status and stop renewing. Errors of the store are logged and not raised. A second call does
        nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.tell(status, **self._said[1])
        self._thread.join(self.every)
        if not self._superseded:
            self._try(self.renew)

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
                supervised=self._stop_reasons.supervised,
            )
            try:
                tag = self.run.store.replace(self._key, encode_lease(lease), tag=found[1] if found else None)
            except Conflict:
                continue  # the previous life has just renewed the lease
            if damage:
                self._tell_repair(lease, f"{damage}: life {life} has replaced it, and a process that held it ends")
            return lease, tag

    def _tell_repair(self, lease: Lease, message: str) -> None:
        self.repairs.append(message)
        # The supervisor reports repairs itself.
        events = Events(self.run, lease.role, lease.life, logs=lease.role != SUPERVISOR)
        events.write(DAMAGED, message, severity="warning")

    def _look_first(self) -> None:
        """Look for a reason to stop before the role starts. If the wanted state is damaged, a role with a supervisor
        starts anyway, because the supervisor restores the state. After any other error, close the lease as failed and
        raise the error."""
        try:
            self._stop_reasons.look()
        except StorageError as error:
            if self._stop_reasons.supervised and isinstance(error, Damaged):
                log.warning("%s: %s", self.role, error)
                return
            self._closing.set()
            self.tell("failed")
            self._try(self.renew)
            raise

    def _keep(self) -> None:
        while not self._closing.wait(self.every) and not self._superseded:
            self._try(self.renew)
            if not self._superseded:
                self._try(self._stop_reasons.look)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except StorageError as error:
            log.warning("%s: %s", self.role, error)

    def _look_who_was_first(self, renewed: Lease) -> None:
        """Find out why a renewal was refused, and react. If this life has written the stored lease itself (an earlier
        request succeeded although it seemed to fail), continue from that lease. If the stored lease is damaged or
        belongs to an older life, write this life's lease again. If a newer life has the lease, or the lease is gone,
        this life is superseded."""
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
        self._superseded = Superseded(f"another {self.role} has taken over {self.run.url}")

    def _take_back(self, renewed: Lease, tag: str, damage: str) -> None:
        """Write this life's lease again, and report this as a repair. If another process has just written the lease, do
        nothing: the next renewal finds out."""
        with suppress(Conflict):
            self._tag = self.run.store.replace(self._key, encode_lease(renewed), tag=tag)
            self._lease = renewed
            self._tell_repair(renewed, f"{damage}: {self.role}, which holds it, has written it again")


def _next_life(run: Run, role: str, data: bytes | None) -> tuple[int, str]:
    """Return the number of the next life of a role, and what is wrong with the role's stored lease (an empty string if
    nothing is)."""
    if data is None:
        return lives.newest_with_events(run, role) + 1, ""
    try:
        return decode_lease(run, layout.lease(role), data).life + 1, ""
    except Damaged as damage:
        return lives.next_after_damage(run, role, data), str(damage)
