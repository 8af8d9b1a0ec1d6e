"""Keeps the roles of a run alive until it has finished: starts, watches, restarts, adopts and stops them.

A supervisor trusts two things: the exit of a process it started, and leases. It owns nothing else: when it dies the
roles go on, and the next supervisor adopts those whose leases move. Knows nothing of Prefect, and of learning only
that searchers are of no use once the trainer has finished, and that a run has finished when its evaluator has, too.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from flows.supervision.alarms import OperatingAlarms
from flows.supervision.life import FAILED_WHY, Event, Launcher, StopRequest
from flows.supervision.role_keeper import DONE_LEARNING, RoleKeeper
from flows.supervision.state_keeper import lease_alarms
from flows.supervision.stopping import StopLadder, Wait, forecast
from flows.supervision.watched import WatchedRoles
from flows.supervision.webhook import open_webhook
from storage.runs.events import EventReader, Events
from storage.runs.leases import DAMAGED, SUPERVISOR, HeldLease, Seen
from storage.runs.run import Run
from tba.alarms import Alarm, Alarms
from tba.config import Config
from tba.errors import RunFailed, Stopped, StorageError

POLL = 0.2  # seconds between looks at processes; leases are read every `limits.lease_every`
HEAR_EVERY = 5.0  # seconds between two looks at what roles have written


def supervise(
    run: Run,
    launcher: Launcher,
    config: Config,
    *,
    should_stop: Callable[[], StopRequest | None] = lambda: None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_look: Callable[[Mapping[str, Seen]], None] = lambda seen: None,
    first_delay: float = 1.0,
) -> None:
    """Returns when the run has finished. Raises Stopped when it was asked to stop, by `should_stop` or through the
    run's state, and RunFailed when a role kept failing; either way every role has been stopped in order. Raises
    Superseded, leaving the roles alone, when another supervisor has taken over.

    `on_event` and `on_look` are told what happens; they return quickly and do not raise.
    """
    with open_webhook(run) as webhook, HeldLease(run, SUPERVISOR, every=config.limits.lease_every) as lease:

        def hear(event: Event) -> None:
            on_event(event)
            if event.is_more_than_news:
                webhook.tell(event.kind, event.message, event.severity, event.data)

        supervisor = Supervisor(run, launcher, config, lease, should_stop, hear, on_look, first_delay)
        try:
            supervisor.run_until_finished()
        finally:
            supervisor.let_go()
        lease.close("finished")


class Supervisor:
    """The loop around all roles of a run: it looks at them, has each of them attended to, and stops them at the end."""

    def __init__(
        self,
        run: Run,
        launcher: Launcher,
        config: Config,
        lease: HeldLease,
        should_stop: Callable[[], StopRequest | None],
        on_event: Callable[[Event], None],
        on_look: Callable[[Mapping[str, Seen]], None],
        first_delay: float,
    ):
        self.run, self.launcher, self.limits, self.lease = run, launcher, config.limits, lease
        self.should_stop, self.on_event, self.on_look = should_stop, on_event, on_look
        self.events = Events(run, SUPERVISOR, lease.life, logs=False)  # `on_event` tells them
        self.news = RoleNews(run)
        self.operating = OperatingAlarms(config.alarms, lag=config.sync.lag or 0)
        self.alarms = Alarms(self.tell)
        self.store_alarm = Alarms(self.tell_of_store)
        self.roles = WatchedRoles(run, config.limits, first_delay, self.tell)
        self.keeper = RoleKeeper(run, launcher, config.limits, self.roles, self.tell)

    def run_until_finished(self) -> None:
        """Wait for roles to end; unblocked by their exits and leases, and by whoever asks for a stop."""
        self.tell("supervisor-started", f"supervisor {self.lease.life} looks after {self.run.url}")
        try:
            while not self.roles.have_finished():
                if request := self.stop_request():
                    self.stop(request.why, request.within)
                    raise Stopped(f"run {self.run.name} was stopped: {request.why}")
                self.attend_all()
                time.sleep(POLL)
        except RunFailed as failure:
            self.tell("run-failed", str(failure), "error")
            self.stop(FAILED_WHY + str(failure).splitlines()[0])
            raise
        self.tell("run-finished", f"run {self.run.name} has finished")
        self.stop("finished")

    def stop_request(self) -> StopRequest | None:
        try:
            self.lease.check()  # Superseded passes through: the roles are another supervisor's now
        except Stopped as stopped:
            return StopRequest(str(stopped).removeprefix(f"{self.run.name} was asked to stop: "))
        return self.should_stop()

    def attend_all(self) -> None:
        """One turn of the loop. While the store cannot be read nothing is judged, and nothing can be started."""
        now, roles = time.monotonic(), self.roles
        try:
            if now >= roles.next_look:
                self.look()
            for role in roles.wanted():
                self.keeper.attend(roles.know(role))
            if roles.state.searchers and roles.has_learned():
                roles.state = roles.wanted_state.change(searchers=0, why=DONE_LEARNING)
            for w in roles.unwanted():
                self.keeper.drain(w)
            self.store_alarm.look([])
        except StorageError as error:
            if now - roles.last_look > self.limits.orphan_after:
                raise
            self.store_alarm.look([Alarm("store-trouble", str(error))])
            time.sleep(self.limits.lease_every)
            roles.look_soon()

    def look(self) -> None:
        """Read the leases and the wanted state, and tell what is to be seen in them."""
        self.roles.look()
        self.lease.tell("supervising", roles=len(self.roles.alive()))
        self.alarms.look([*self.operating.find(self.roles.open_leases()), *lease_alarms(self.roles.watch)])
        while self.lease.repairs:
            self.on_event(Event(DAMAGED, self.lease.repairs.popleft(), "warning"))
        for event in self.news.new():
            self.on_event(event)
        self.on_look(self.roles.seen)

    # Stopping all roles

    def stop(self, why: str, within: float | None = None) -> None:
        """Climb the stop ladder until every role has ended, and tidy up after them."""
        self.tell("run-stopping", f"stopping: {why}{forecast(self.roles.open_leases())}")
        ladder = StopLadder(self.limits, self.launcher.end_grace, within)
        if cut_short := ladder.patience.cut_short(self.roles.open_leases()):
            self.tell("stop-cut-short", cut_short, "warning")
        for rung in ladder.rungs(was_asked=self.ask_to_stop(why)):
            if rung.signal:
                for w in self.roles.alive():
                    self.tell("role-stopping", f"{w.name} still runs: {rung.signal.name}", "warning", **w.about)
                    self.keeper.signal(w, rung.signal)
            self.await_ends(rung.wait)
        for w in self.roles.alive():
            self.tell("role-left", f"{w.name} could not be stopped from here", "error", **w.about)
        try:
            self.launcher.close()
        except StorageError as error:
            self.tell("log-not-stored", f"some logs stay on this host: {error}", "warning")

    def ask_to_stop(self, why: str) -> bool:
        """Say in the run's state that it is to stop; False if that cannot be written."""
        try:
            self.roles.wanted_state.change(desired="stop", why=why)
        except StorageError as error:
            self.on_event(Event("store-trouble", f"the roles are stopped without being asked: {error}", "warning"))
            return False
        return True

    def await_ends(self, wait: Wait) -> None:
        """Return once every role has ended, or the wait for each one that lives is over."""
        roles = self.roles
        while True:
            for w in roles.watched.values():
                self.keeper.bury_ended(w)
            if time.monotonic() >= roles.next_look:
                self.look_if_possible()
            for w in roles.watched.values():
                if not roles.is_alive(w):
                    self.keeper.bury_adopted(w)
            # Every role is asked about, as the wait for it may begin when it is first asked about.
            overs = [wait.is_over(w.name, roles.lease_of(w)) for w in roles.alive()]
            if all(overs):
                return
            time.sleep(POLL)

    def look_if_possible(self) -> None:
        try:
            self.look()
            self.store_alarm.look([])
        except StorageError as error:
            self.store_alarm.look([Alarm("store-trouble", str(error))])
            self.roles.next_look = time.monotonic() + self.limits.lease_every

    def let_go(self) -> None:
        for w in self.roles.watched.values():
            if w.life:
                w.life.let_go()

    def tell(self, kind: str, message: str, severity: str = "info", **data: Any) -> None:
        self.events.write(kind, message, severity=severity, **data)
        self.on_event(Event(kind, message, severity, data))

    def tell_of_store(self, kind: str, message: str, severity: str, **data: Any) -> None:
        """Tell, but store nothing: that would have to wait for the store."""
        self.on_event(Event(kind, message, severity, data))


class RoleNews:
    """What the roles of a run write that is more than news, but for what they had written before."""

    def __init__(self, run: Run):
        self.reader = EventReader(run)
        self.next_look = 0.0

    def new(self) -> Iterator[Event]:
        if time.monotonic() < self.next_look:
            return
        is_first, self.next_look = self.next_look == 0, time.monotonic() + HEAR_EVERY
        with suppress(StorageError):  # one that cannot be read is no reason not to look after the others
            for record in self.reader.new():
                data = {**(record.get("data") or {}), "role": record["role"]}
                event = Event(record["kind"], f"{record['role']}: {record['message']}", record["severity"], data)
                if not is_first and record["role"] != SUPERVISOR and event.is_more_than_news:
                    yield event
