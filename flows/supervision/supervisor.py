"""Keep the roles of a run alive until the run has finished: start, watch, restart, adopt and stop them.

A supervisor relies on two facts only: the exit of a process that it started, and leases. If the supervisor dies, the
roles continue, and the next supervisor adopts those that renew their leases. A supervisor knows nothing of Prefect. Of
training it knows two rules: when the trainer has finished, no searchers are needed, and when the evaluator has finished
as well, the run has finished.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from flows.supervision.alarms import OperatingAlarms, lease_alarms
from flows.supervision.interfaces import FAILED_WHY, Event, Launcher, StopRequest
from flows.supervision.role_keeper import DONE_LEARNING, RoleKeeper
from flows.supervision.role_states import TRAINER, WatchedRoles
from flows.supervision.stopping import StopLadder, Wait, forecast
from flows.supervision.webhook import open_webhook
from storage.runs.events import EventReader, Events
from storage.runs.held_lease import HeldLease
from storage.runs.lease_watch import Seen
from storage.runs.leases import DAMAGED, SUPERVISOR
from storage.runs.run import Run
from tba.alarms import Alarm, Alarms
from tba.config import Config
from tba.errors import RunFailed, Stopped, StorageError

POLL = 0.2  # seconds between looks at processes; leases are read every `limits.lease_every`
HEAR_EVERY = 5.0  # seconds between two looks at the events of the roles


def supervise(
    run: Run,
    launcher: Launcher,
    config: Config,
    *,
    should_stop: Callable[[], StopRequest | None] = lambda: None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_look: Callable[[Mapping[str, Seen]], None] = lambda seen: None,
    external_trainer: bool = False,
    first_delay: float = 1.0,
) -> None:
    """Keep the roles of a run alive, and return when the run has finished. Raise Stopped if a stop was requested by
    `should_stop` or in the run's wanted state, and RunFailed if the run cannot go on, for example because a role kept
    failing. In both cases the stop ladder has first stopped the roles. Raise Superseded if another supervisor has taken
    over, and StorageError if the store could not be read for `limits.orphan_after` seconds. In these two cases the
    roles are left alone.

    With `external_trainer`, something else starts the trainer, such as torchrun. The supervisor waits for each of its
    lives, up to `limits.data_deadline` seconds, and adopts it by its lease. It starts no other.

    `on_event` is called with each event and `on_look` with the leases each time they are read. Both must return quickly
    and must not raise.
    """
    with open_webhook(run) as webhook, HeldLease(run, SUPERVISOR, every=config.limits.lease_every) as lease:

        def hear(event: Event) -> None:
            on_event(event)
            if event.is_more_than_news:
                webhook.tell(event.kind, event.message, event.severity, event.data)

        supervisor = Supervisor(run, launcher, config, lease, should_stop, hear, on_look, external_trainer, first_delay)
        try:
            supervisor.run_until_finished()
        finally:
            supervisor.let_go()
        lease.close("finished")


class Supervisor:
    """The loop around all roles of a run: reads their leases, lets the keeper attend to each role, and stops all roles
    at the end."""

    def __init__(
        self,
        run: Run,
        launcher: Launcher,
        config: Config,
        lease: HeldLease,
        should_stop: Callable[[], StopRequest | None],
        on_event: Callable[[Event], None],
        on_look: Callable[[Mapping[str, Seen]], None],
        external_trainer: bool,
        first_delay: float,
    ):
        self.run, self.launcher, self.limits, self.lease = run, launcher, config.limits, lease
        self.should_stop, self.on_event, self.on_look = should_stop, on_event, on_look
        self.events = Events(run, SUPERVISOR, lease.life, logs=False)  # not logged: `on_event` shows them
        self.news = RoleNews(run)
        self.operating = OperatingAlarms(config.alarms, lag=config.sync.lag or 0)
        self.alarms = Alarms(self.tell)
        self.store_alarm = Alarms(self.tell_of_store)
        external = [TRAINER] if external_trainer else []
        self.roles = WatchedRoles(run, config.limits, first_delay, self.tell, external=external)
        self.keeper = RoleKeeper(run, launcher, config.limits, self.roles, self.tell)

    def run_until_finished(self) -> None:
        """Attend to the roles until they have finished, a stop is requested, or the run fails. Then stop all roles."""
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
            self.lease.check()  # may raise Superseded: the roles then belong to another supervisor
        except Stopped as stopped:
            return StopRequest(str(stopped).removeprefix(f"{self.run.name} was asked to stop: "))
        return self.should_stop()

    def attend_all(self) -> None:
        """Do one turn of the loop. While the store cannot be read, no role is judged and none is started."""
        now, roles = time.monotonic(), self.roles
        try:
            if now >= roles.next_look:
                self.look()
            for role in roles.wanted():
                self.keeper.attend(roles.know(role))
            if roles.state.searchers and roles.has_learned():
                roles.state = roles.wanted_state.change(searchers=0, why=DONE_LEARNING)
            for watched in roles.unwanted():
                self.keeper.drain(watched)
            self.store_alarm.update([])
        except StorageError as error:
            if now - roles.last_look > self.limits.orphan_after:
                raise
            self.store_alarm.update([Alarm("store-trouble", str(error))])
            time.sleep(self.limits.lease_every)
            roles.look_soon()

    def look(self) -> None:
        """Read the leases and the wanted state. Report alarms and new events of the roles."""
        self.roles.read_leases()
        self.lease.tell("supervising", roles=len(self.roles.alive()))
        self.alarms.update([*self.operating.find(self.roles.open_leases()), *lease_alarms(self.roles.watch)])
        while self.lease.repairs:
            self.on_event(Event(DAMAGED, self.lease.repairs.popleft(), "warning"))
        for event in self.news.new():
            self.on_event(event)
        self.on_look(self.roles.seen)

    # Stopping all roles

    def stop(self, why: str, within: float | None = None) -> None:
        """Ask all roles to stop, then send SIGTERM, then SIGKILL, as `StopLadder` says. `within` is the number of
        seconds that this may take. Report roles that are still running, and store the remaining logs."""
        self.tell("run-stopping", f"stopping: {why}{forecast(self.roles.open_leases())}")
        ladder = StopLadder(self.limits, self.launcher.end_grace, within)
        if cut_short := ladder.patience.cut_short(self.roles.open_leases()):
            self.tell("stop-cut-short", cut_short, "warning")
        for rung in ladder.rungs(was_asked=self.ask_to_stop(why)):
            if rung.signal:
                for watched in self.roles.alive():
                    message = f"{watched.name} is still running: sending {rung.signal.name}"
                    self.tell("role-stopping", message, "warning", **watched.about)
                    self.keeper.signal(watched, rung.signal)
            self.await_ends(rung.wait)
        for watched in self.roles.alive():
            self.tell("role-left", f"{watched.name} could not be stopped from this host", "error", **watched.about)
        try:
            self.launcher.close()
        except StorageError as error:
            self.tell("log-not-stored", f"some logs could not be stored and stay on this host: {error}", "warning")

    def ask_to_stop(self, why: str) -> bool:
        """Write into the run's wanted state that the run is to stop. Return False if the state cannot be written."""
        try:
            self.roles.wanted_state.change(desired="stop", why=why)
        except StorageError as error:
            message = f"the roles are stopped by signals, because the wanted state cannot be written: {error}"
            self.on_event(Event("store-trouble", message, "warning"))
            return False
        return True

    def await_ends(self, wait: Wait) -> None:
        """Return when each role has either ended or used up the time that `wait` gives it."""
        roles = self.roles
        while True:
            for watched in roles.watched.values():
                self.keeper.bury_ended(watched)
            if time.monotonic() >= roles.next_look:
                self.look_if_possible()
            for watched in roles.watched.values():
                if not roles.is_alive(watched):
                    self.keeper.bury_adopted(watched)
            # A list, not a generator: the first call for a role may start the wait for it.
            overs = [wait.is_over(watched.name, roles.lease_of(watched)) for watched in roles.alive()]
            if all(overs):
                return
            time.sleep(POLL)

    def look_if_possible(self) -> None:
        try:
            self.look()
            self.store_alarm.update([])
        except StorageError as error:
            self.store_alarm.update([Alarm("store-trouble", str(error))])
            self.roles.next_look = time.monotonic() + self.limits.lease_every

    def let_go(self) -> None:
        for watched in self.roles.watched.values():
            if watched.life:
                watched.life.let_go()

    def tell(self, kind: str, message: str, severity: str = "info", **data: Any) -> None:
        self.events.write(kind, message, severity=severity, **data)
        self.on_event(Event(kind, message, severity, data))

    def tell_of_store(self, kind: str, message: str, severity: str, **data: Any) -> None:
        """Report an event without storing it, because the store does not answer."""
        self.on_event(Event(kind, message, severity, data))


class RoleNews:
    """Reads the new events of a run's roles that people are to be notified of. Events from before the first call of
    `new` are left out."""

    def __init__(self, run: Run):
        self.reader = EventReader(run)
        self.next_look = 0.0

    def new(self) -> Iterator[Event]:
        if time.monotonic() < self.next_look:
            return
        is_first, self.next_look = self.next_look == 0, time.monotonic() + HEAR_EVERY
        with suppress(StorageError):  # unreadable events must not end the supervisor
            for record in self.reader.new():
                data = {**(record.get("data") or {}), "role": record["role"]}
                event = Event(record["kind"], f"{record['role']}: {record['message']}", record["severity"], data)
                if not is_first and record["role"] != SUPERVISOR and event.is_more_than_news:
                    yield event
