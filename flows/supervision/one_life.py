"""Start and watch one life of a role on the host where it runs, for a supervisor on another host."""

import time
from collections.abc import Callable

from flows.supervision.interfaces import Event, Launcher, Life, StopRequest
from flows.supervision.processes import FAILED, STOPPED, NotNow, Role
from flows.supervision.silence import hangs
from flows.supervision.stopping import Stopping, forecast
from flows.supervision.supervisor import POLL
from storage.runs.lease_watch import LeaseWatch, Seen
from storage.runs.run import Run
from tba.config import LimitsConfig
from tba.errors import RunFailed, StorageError


def watch_one(
    run: Run,
    launcher: Launcher,
    limits: LimitsConfig,
    role: Role,
    number: int,
    *,
    should_stop: Callable[[], StopRequest | None] = lambda: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> tuple[int, str]:
    """Start one life of a role and watch it until it ends or cannot be killed. Return its exit code and the end of its
    log. The run's supervisor decides whether the role is started again."""
    before = LeaseWatch().observe(run).get(role.name)
    life = _start_when_possible(launcher, limits, role, number, should_stop, on_event)
    if life is None:
        return STOPPED, ""
    watched = _WatchedLife(run, launcher, limits, life, before.lease.life if before else 0, on_event)
    while (code := life.poll()) is None:
        if watched.stopping is None and (request := should_stop()):
            watched.ask_to_stop(request)
        if watched.is_lost():
            life.let_go()
            return FAILED, f"its process could not be killed: {life.where}"
        watched.look()
        time.sleep(POLL)
    try:
        launcher.ended(life)
    except StorageError as error:
        message = f"the log of {role.name} could not be stored and stays on this host ({life.where}): {error}"
        on_event(Event("log-not-stored", message, "warning"))
    return code, life.last_words()


class _WatchedLife:
    """A running life: detects whether it hangs, and stops it in order or kills it."""

    def __init__(
        self,
        run: Run,
        launcher: Launcher,
        limits: LimitsConfig,
        life: Life,
        life_before: int,
        on_event: Callable[[Event], None],
    ):
        self.run, self.launcher, self.limits, self.life = run, launcher, limits, life
        self.life_before, self.on_event = life_before, on_event
        self.name = life.role.name
        self.began = self.next_look = time.monotonic()
        self.watch = LeaseWatch()
        self.seen: Seen | None = None
        self.stopping: Stopping | None = None
        self.killed: float | None = None  # the moment of the first kill

    def ask_to_stop(self, request: StopRequest) -> None:
        seen = {self.name: self.seen} if self.seen else {}
        self.stopping = Stopping(self.limits, None if request.within is None else 0.8 * request.within)
        self.on_event(Event("role-stopping", f"{self.name} is asked to stop: {request.why}{forecast(seen)}"))
        if cut_short := self.stopping.cut_short(seen):
            self.on_event(Event("stop-cut-short", cut_short, "warning"))
        self.life.terminate()

    def is_lost(self) -> bool:
        """Kill the life if it hangs or does not stop in time. Return True if it has not ended `end_grace` seconds after
        the first kill."""
        now = time.monotonic()
        if self.killed is None and self.stopping and self.stopping.is_over(self.name, self.seen):
            self.killed = now
        if self.killed is None:
            return False
        self.life.kill()
        return now > self.killed + self.launcher.end_grace

    def look(self) -> None:
        """Every `lease_every` seconds, read the lease and note whether the life hangs. If the store cannot be read,
        begin to measure the silence of the lease anew, because the failure says nothing about the role."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + self.limits.lease_every
        try:
            self.seen = self.watch.observe(self.run).get(self.name)
        except StorageError as error:
            self.watch = LeaseWatch()
            self.on_event(Event("store-trouble", str(error), "warning"))
            return
        why = hangs(self.seen, self.life_before, now - self.began, self.limits, self.launcher)
        if why and self.killed is None:
            self.on_event(Event("role-silent", f"{self.name} {why}", "warning"))
            self.killed = now


def _start_when_possible(
    launcher: Launcher,
    limits: LimitsConfig,
    role: Role,
    number: int,
    should_stop: Callable[[], StopRequest | None],
    on_event: Callable[[Event], None],
) -> Life | None:
    """Start a life. While the launcher cannot start it, try again. Return None if a stop is requested before the life
    has started. Raise RunFailed after `limits.data_deadline` seconds."""
    began, said = time.monotonic(), ""
    while not should_stop():
        try:
            life = launcher.start(role, number)
        except NotNow as reason:
            if str(reason) != said:
                said = str(reason)
                on_event(Event("role-waiting", f"{role.name} cannot start yet: {reason}", "warning"))
            if time.monotonic() - began > limits.data_deadline:
                raise RunFailed(
                    f"{role.name} could not be started for {limits.data_deadline:.0f} s: {reason}"
                ) from None
            time.sleep(limits.lease_every)
        else:
            on_event(Event("role-started", f"{role.name}, life {number}: {life.where}"))
            return life
    return None
