"""The roles of a run as their supervisor sees them: which are wanted, the state of each, and which are alive."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from flows.supervision.alarms import how_far
from flows.supervision.interfaces import CLOSED, Life
from flows.supervision.processes import Role, is_gone
from flows.supervision.restarts import RestartBudget
from flows.supervision.silence import has_begun
from flows.supervision.stopping import Draining, RepeatedKill
from storage.runs.control import State, change_state, keep_state, restore_state
from storage.runs.lease_watch import LeaseWatch, Seen
from storage.runs.leases import Lease
from storage.runs.run import Run
from tba.config import LimitsConfig
from tba.errors import Damaged

TRAINER, EVALUATOR = Role("trainer"), Role("evaluator")


@dataclass
class Absent:
    """No life of the role is known. The role is started as soon as its restart budget and the launcher allow."""

    refusal: str = ""  # why the launcher could not start the role
    refused_since: float | None = None
    next_try: float = 0.0


@dataclass
class Started:
    """The supervisor has started a life of the role and has not seen it end."""

    life: Life
    life_before: int
    """The life number in the role's lease when this life was started. A lease with a higher number belongs to this
    life."""
    since: float
    told_waiting: bool = False  # an event has reported that this life has not begun yet
    kill: RepeatedKill | None = None  # set once the life hangs

    def has_begun(self, seen: Seen | None) -> bool:
        return has_begun(seen, self.life_before)


@dataclass
class Elsewhere:
    """The lease of the role is held by a life that this supervisor has not started. The supervisor adopts the life once
    the life renews the lease."""

    first_seen: tuple[int, int]  # life and counter of the lease
    is_adopted: bool = False


@dataclass
class Finished:
    """The role has done its work. It is not started again, unless it is unwanted for a while and then wanted again."""


class Watched:
    """One role, with its state and its restart budget."""

    def __init__(self, role: Role, restarts: RestartBudget, *, is_external: bool = False):
        self.role, self.restarts = role, restarts
        self.is_external = is_external  # something else starts the role
        self.state: Absent | Started | Elsewhere | Finished = Absent()
        self.number = 0  # number of the latest life that this supervisor has started or adopted
        self.draining: Draining | None = None  # set while a searcher lives that is not wanted any more
        self.told_silent = 0  # the latest life for which an event has reported that its lease is silent

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def about(self) -> dict[str, Any]:
        """The fields that each event about this role has in its data."""
        return {"of": self.name, "life": self.number}

    @property
    def life(self) -> Life | None:
        return self.state.life if isinstance(self.state, Started) else None

    @property
    def is_adopted(self) -> bool:
        return isinstance(self.state, Elsewhere) and self.state.is_adopted

    @property
    def is_finished(self) -> bool:
        return isinstance(self.state, Finished)

    def may_start(self, now: float) -> bool:
        return isinstance(self.state, Absent) and now >= max(self.state.next_try, self.restarts.not_before)

    def start(self, life: Life, life_before: int, now: float) -> None:
        self._change(Started(life, life_before, now))
        self.number = life.number

    def refuse(self, reason: str, now: float, again_in: float) -> tuple[float, bool]:
        """Note that the launcher cannot start the role. Return for how many seconds it has been unable to, and whether
        the reason is new."""
        before = self.state if isinstance(self.state, Absent) else Absent()
        since = now if before.refused_since is None else before.refused_since
        self.state = Absent(reason, since, now + again_in)
        return now - since, reason != before.refusal

    def follow(self, lease: Lease) -> bool:
        """Note the lease of a life that this supervisor has not started. Return True if the life has just been adopted,
        because it has renewed the lease."""
        mark = (lease.life, lease.counter)
        if not isinstance(self.state, Elsewhere):
            self.state = Elsewhere(mark)
        if self.state.is_adopted or mark == self.state.first_seen:
            return False
        self.state.is_adopted, self.number = True, lease.life
        return True

    def end(self) -> None:
        """Note that the current life of the role has ended. Do nothing if no life is known."""
        if not isinstance(self.state, Absent):
            self._change(Absent())

    def finish(self) -> None:
        self._change(Finished())

    def forget(self) -> None:
        """Note that a role that is not wanted has ended. If the role is wanted again later, a new life is started."""
        self._change(Absent())

    def _change(self, state: Absent | Started | Elsewhere | Finished) -> None:
        self.state, self.draining = state, None


class WatchedRoles:
    """All roles of a run. Their state follows from their leases, the wanted state, and the lives that the supervisor
    has started."""

    def __init__(
        self,
        run: Run,
        limits: LimitsConfig,
        first_delay: float,
        tell: Callable[..., None],
        *,
        external: Collection[Role] = (),  # roles that something else starts
    ):
        self.run, self.limits, self.first_delay, self.external = run, limits, first_delay, external
        self.watched: dict[Role, Watched] = {}
        self.seen: dict[str, Seen] = {}
        self.state = State()
        self.wanted_state = WantedState(run, tell)
        self.watch = LeaseWatch()
        self.last_look = time.monotonic()
        self.next_look = 0.0

    def read_leases(self) -> None:
        """Read the leases and the wanted state. If the last look was long ago, restart the measurement of every lease's
        silence now: a role must not count as dead because this supervisor did not look."""
        if time.monotonic() - self.last_look > max(self.limits.silent_after / 2, 3 * self.limits.lease_every):
            self.watch = LeaseWatch()
        self.seen = self.watch.observe(self.run)
        self.state = self.wanted_state.read()
        self.last_look = time.monotonic()
        self.next_look = self.last_look + self.limits.lease_every
        for name, seen in self.seen.items():
            if role := Role.parse(name):
                self.know(role).restarts.note_progress(how_far(seen.lease))

    def look_soon(self) -> None:
        self.next_look = 0.0

    def know(self, role: Role) -> Watched:
        if role not in self.watched:
            restarts = RestartBudget(self.limits, self.first_delay)
            self.watched[role] = Watched(role, restarts, is_external=role in self.external)
        return self.watched[role]

    # What is wanted

    def wanted(self) -> list[Role]:
        """Return the wanted roles in the order in which they are started and get devices. The evaluator is last,
        because it suffers least from sharing a device. When the trainer has finished, no searchers are wanted."""
        searchers = 0 if self.has_learned() else self.state.searchers
        return [TRAINER, *(Role("searcher", i) for i in range(searchers)), EVALUATOR]

    def unwanted(self) -> list[Watched]:
        wanted = self.wanted()
        return [watched for role, watched in self.watched.items() if role not in wanted]

    def has_learned(self) -> bool:
        """True if the trainer has finished."""
        return self.know(TRAINER).is_finished

    def have_finished(self) -> bool:
        """True if the run has nothing left to do: its trainer and its evaluator have finished."""
        return self.has_learned() and self.know(EVALUATOR).is_finished

    # What is there

    def lease_of(self, watched: Watched) -> Seen | None:
        return self.seen.get(watched.name)

    def open_leases(self) -> dict[str, Seen]:
        """Return the leases of roles that may be alive."""
        return {name: seen for name, seen in self.seen.items() if _is_open(seen.lease)}

    def is_open(self, watched: Watched) -> bool:
        seen = self.lease_of(watched)
        return seen is not None and _is_open(seen.lease)

    def moves(self, watched: Watched) -> bool:
        """Return True if the lease of a role is open and was renewed within `limits.silent_after` seconds."""
        seen = self.lease_of(watched)
        return seen is not None and _is_open(seen.lease) and seen.silent_for <= self.limits.silent_after

    def is_alive(self, watched: Watched) -> bool:
        return watched.life is not None or self.moves(watched)

    def alive(self) -> list[Watched]:
        return [watched for watched in self.watched.values() if self.is_alive(watched)]


def _is_open(lease: Lease) -> bool:
    return lease.status not in CLOSED and not is_gone(lease)


class WantedState:
    """Reads and changes the wanted state of a run for a supervisor. If the stored state is damaged or gone, this class
    stores the state that it has read last, and reports this by `tell(kind, message, severity)`."""

    def __init__(self, run: Run, tell: Callable[[str, str, str], None]):
        self.run, self.tell = run, tell
        self.last: State | None = None

    def read(self) -> State:
        """Return the wanted state. Raise Damaged if the stored state is damaged and this object has never read an
        intact one."""
        try:
            self.last = keep_state(self.run, self.last)
        except Damaged as damage:
            if self.last is None:
                raise
            self.last = restore_state(self.run, self.last)
            self.tell("state-damaged", f"{damage}: restored, {_say(self.last)}", "warning")
        return self.last or State()

    def change(self, **changes: object) -> State:
        self.read()
        self.last = change_state(self.run, **changes)
        return self.last


def _say(state: State) -> str:
    wanted = f"desired={state.desired!r} and searchers={state.searchers}"
    return f"as it was read last, with {wanted}; if you have changed it since then, change it again"
