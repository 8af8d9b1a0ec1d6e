"""Keeps the roles of a run alive until it has finished: starts, watches, restarts, adopts and stops them.

A supervisor trusts two things: the exit of a process it started, and leases. It owns nothing else: when it dies the
roles go on, and the next supervisor adopts those whose leases move. Knows nothing of Prefect, and of learning only
that searchers are of no use once the trainer has finished, and that a run has finished when its evaluator has, too.
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flows.supervision.alarms import OperatingAlarms, how_far
from flows.supervision.grace_period import Patience, Stopping, forecast, patience
from flows.supervision.last_words import describe_exit, quote_log, refusal_in_log, why_it_ended
from flows.supervision.life import CLOSED, FAILED_WHY, Event, Launcher, Life, StopRequest, hangs, has_begun, say_silent
from flows.supervision.processes import (
    FINISHED,
    GAVE_UP,
    MISUSED,
    STOPPED,
    SUPERSEDED,
    NotNow,
    Role,
    is_gone,
    last_life,
    signal_role,
)
from flows.supervision.state_keeper import WantedState, lease_alarms
from flows.supervision.webhook import open_webhook
from storage.runs.control import State
from storage.runs.events import EventReader, Events
from storage.runs.held_lease import HeldLease
from storage.runs.lease_watch import LeaseWatch, Seen
from storage.runs.leases import DAMAGED, SUPERVISOR, Lease
from storage.runs.run import Run
from tba.alarms import Alarm, Alarms
from tba.config import Config
from tba.errors import RunFailed, Stopped, StorageError

POLL = 0.2  # seconds between looks at processes; leases are read every `limits.lease_every`
HEAR_EVERY = 5.0  # seconds between two looks at what roles have written
LONGEST_DELAY = 60.0  # seconds between two restarts of a role
INSIST_EVERY = 5.0  # seconds between two attempts at ending a life that hangs
PATIENCE = 30.0  # seconds after which a life that has not begun is spoken of
DONE_LEARNING = "the trainer has finished"  # why searchers are asked to stop while the last version is scored


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


@dataclass
class Watched:
    """What the supervisor knows of one role."""

    role: Role
    life: Life | None = None  # what it started and has not seen end
    since: float = 0.0  # when it started it
    life_before: int = 0  # of the lease then
    killed: float | None = None  # since when it is being ended because it hangs
    next_kill: float = 0.0
    told_waiting: bool = False  # that it has not begun
    never_began: int = 0  # lives in a row that took no lease
    number: int = 0
    first_seen: tuple[int, int] | None = None  # life and counter of somebody else's lease
    told_silent: int = 0  # life of the lease of which that was said
    adopted: bool = False
    finished: bool = False
    ends: deque[float] = field(default_factory=deque)  # when it ended too early
    furthest: float = 0.0  # it has got
    in_vain: int = 0  # ends since then
    not_before: float = 0.0
    waits: tuple[str, float] | None = None  # why it cannot be started, and since when
    draining: Patience | None = None  # with a searcher too many, since it was asked to stop


class Supervisor:
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
        self.should_stop, self.on_event, self.on_look, self.first_delay = should_stop, on_event, on_look, first_delay
        self.events = Events(run, SUPERVISOR, lease.life, logs=False)  # `on_event` tells them
        self.others = EventReader(run)
        self.operating = OperatingAlarms(config.alarms, lag=config.sync.lag or 0)
        self.alarms = Alarms(self.tell)
        self.store_alarm = Alarms(self.tell_of_store)
        self.watched: dict[Role, Watched] = {}
        self.watch = LeaseWatch()
        self.seen: dict[str, Seen] = {}
        self.state = State()
        self.wanted_state = WantedState(run, self.tell)
        self.next_look = self.next_hearing = 0.0
        self.last_look = time.monotonic()

    def run_until_finished(self) -> None:
        """Waits for roles to end; unblocked by their exits and leases, and by whoever asks for a stop."""
        self.tell("supervisor-started", f"supervisor {self.lease.life} looks after {self.run.url}")
        try:
            while not self.finished():
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

    # What is wanted, and what is there

    def stop_request(self) -> StopRequest | None:
        try:
            self.lease.check()  # Superseded passes through: the roles are another supervisor's now
        except Stopped as stopped:
            return StopRequest(str(stopped).removeprefix(f"{self.run.name} was asked to stop: "))
        return self.should_stop()

    def finished(self) -> bool:
        return all(
            role in self.watched and self.watched[role].finished for role in (Role("trainer"), Role("evaluator"))
        )

    def look(self) -> None:
        """Read the leases and the wanted state. After a blind time every silence is measured anew, so that nobody
        is taken for dead because of it."""
        if time.monotonic() - self.last_look > max(self.limits.silent_after / 2, 3 * self.limits.lease_every):
            self.watch = LeaseWatch()
        self.seen = self.watch.observe(self.run)
        self.state = self.wanted_state.read()
        self.last_look = time.monotonic()
        self.next_look = self.last_look + self.limits.lease_every
        for role, seen in ((Role.parse(name), seen) for name, seen in self.seen.items()):
            if role:
                w, far = self.know(role), how_far(seen.lease)
                if far > w.furthest:
                    w.furthest, w.in_vain = far, 0
        self.lease.tell("supervising", roles=len(self.alive()))
        self.alarms.look([*self.operating.find(self.seen_open()), *lease_alarms(self.watch)])
        while self.lease.repairs:
            self.on_event(Event(DAMAGED, self.lease.repairs.popleft(), "warning"))
        self.hear_roles()
        self.on_look(self.seen)

    def hear_roles(self) -> None:
        """Tell on what roles write that is more than news, but for what they had written before."""
        if time.monotonic() < self.next_hearing:
            return
        tells, self.next_hearing = self.next_hearing > 0, time.monotonic() + HEAR_EVERY
        with suppress(StorageError):  # one that cannot be read is no reason not to look after the others
            for event in self.others.new():
                data = {**(event.get("data") or {}), "role": event["role"]}
                told = Event(event["kind"], f"{event['role']}: {event['message']}", event["severity"], data)
                if tells and event["role"] != SUPERVISOR and told.is_more_than_news:
                    self.on_event(told)

    def wanted(self) -> list[Role]:
        """In the order in which they are started, and so find a device: the evaluator can best do without its own.
        Nobody would learn from searchers once the trainer has finished."""
        searchers = 0 if self.know(Role("trainer")).finished else self.state.searchers
        return [Role("trainer"), *(Role("searcher", i) for i in range(searchers)), Role("evaluator")]

    def know(self, role: Role) -> Watched:
        return self.watched.setdefault(role, Watched(role))

    def is_open(self, w: Watched) -> bool:
        """Whether somebody may be behind the lease of a role."""
        seen = self.seen.get(w.role.name)
        return seen is not None and _is_open(seen.lease)

    def seen_open(self) -> dict[str, Seen]:
        return {name: seen for name, seen in self.seen.items() if _is_open(seen.lease)}

    def is_silent(self, w: Watched) -> bool:
        return self.seen[w.role.name].silent_for > self.limits.silent_after

    def is_alive(self, w: Watched) -> bool:
        return w.life is not None or (self.is_open(w) and not self.is_silent(w))

    def alive(self) -> list[Watched]:
        return [w for w in self.watched.values() if self.is_alive(w)]

    # Keeping them alive

    def attend_all(self) -> None:
        """One turn of the loop. While the store cannot be read nothing is judged, and nothing can be started."""
        now = time.monotonic()
        try:
            if now >= self.next_look:
                self.look()
            for role in self.wanted():
                self.attend(self.know(role))
            if self.state.searchers and self.know(Role("trainer")).finished:
                self.state = self.wanted_state.change(searchers=0, why=DONE_LEARNING)
            for role in self.watched.keys() - set(self.wanted()):
                self.drain(self.watched[role])
            self.store_alarm.look([])
        except StorageError as error:
            if now - self.last_look > self.limits.orphan_after:
                raise
            self.store_alarm.look([Alarm("store-trouble", str(error))])
            time.sleep(self.limits.lease_every)
            self.next_look = 0.0

    def attend(self, w: Watched) -> None:
        if w.finished:
            return
        if w.life is None:
            if not self.lives_elsewhere(w) and not w.finished and time.monotonic() >= w.not_before:
                self.start(w)
        elif (code := self.end_of(w, w.life)) is not None:
            self.ended(w, w.life, code)
        elif w.killed is None:
            self.judge(w, w.life)
        else:
            self.insist(w, w.life, w.killed)

    def end_of(self, w: Watched, life: Life) -> int | None:
        """The exit code of a life that has ended: as whoever watches it there says, or as the role itself has said
        where nobody watches it any more."""
        code, seen = life.poll(), self.seen.get(w.role.name)
        if code is None and has_begun(seen, w.life_before) and seen.silent_for > self.launcher.last_word_after:
            return CLOSED.get(seen.lease.status)
        return code

    def judge(self, w: Watched, life: Life) -> None:
        seen, now = self.seen.get(w.role.name), time.monotonic()
        if why := hangs(seen, w.life_before, now - w.since, self.limits, self.launcher):
            w.killed, w.next_kill = now, now + INSIST_EVERY
            self.tell("role-silent", f"{w.role.name} {why}", "warning", w=w)
            life.kill()
        elif has_begun(seen, w.life_before):
            w.never_began = 0
        elif not w.told_waiting and now - w.since > PATIENCE and life.waits_for:
            w.told_waiting = True
            self.tell("role-waiting", f"{w.role.name} has not begun yet: {life.waits_for}", "warning", w=w)

    def insist(self, w: Watched, life: Life, killed: float) -> None:
        """A kill can get lost, or not be heard: a machine is gone, a process waits for a disk. The lease keeps a life
        that comes back from doing harm."""
        now = time.monotonic()
        if now - killed > self.launcher.end_grace:
            life.let_go()
            w.life, w.draining, self.next_look = None, None, 0.0
            self.tell("role-lost", f"{w.role.name} could not be ended: {life.where}", "error", w=w)
            self.delay_restart(w, f"it was lost; {quote_log(life)}")
        elif now >= w.next_kill:
            w.next_kill = now + INSIST_EVERY
            life.kill()

    def start(self, w: Watched) -> None:
        if w.role not in self.wanted():
            return  # the trainer has finished a moment ago
        seen, now = self.seen.get(w.role.name), time.monotonic()
        w.life_before = seen.lease.life if seen else 0
        number = max(w.number, w.life_before, last_life(self.run, w.role)) + 1
        try:
            w.life = self.launcher.start(w.role, number)
        except NotNow as reason:
            self.wait(w, str(reason), now)
            return
        w.number, w.since, w.waits = w.life.number, now, None
        w.killed, w.told_waiting = None, False
        self.tell("role-started", f"{w.role.name}, life {w.number}: {w.life.where}", w=w)

    def wait(self, w: Watched, reason: str, now: float) -> None:
        """It cannot be started: say so once, and try again, until the deadline."""
        before, since = w.waits or ("", now)
        if reason != before:
            self.tell("role-waiting", f"{w.role.name} cannot start yet: {reason}", "warning", w=w)
        if now - since > self.limits.data_deadline:
            raise RunFailed(f"{w.role.name} could not be started for {now - since:.0f} s: {reason}")
        w.waits, w.not_before = (reason, since), now + self.limits.lease_every

    def ended(self, w: Watched, life: Life, code: int) -> None:
        self.look()  # at its last word, and at what is wanted now: it may have heard of that before us
        was_asked = w.draining is not None
        self.bury(w, life, code)
        if w.role not in self.wanted() or was_asked:  # and is wanted again, perhaps
            return
        seen = self.seen.get(w.role.name)
        if code == FINISHED or (seen and seen.lease.life > w.life_before and seen.lease.status == "finished"):
            w.finished = True
        elif code == MISUSED:
            raise RunFailed(f"{w.role.name} cannot do what it was asked to; {refusal_in_log(life)}")
        elif code == GAVE_UP:
            raise RunFailed(f"{w.role.name} has waited in vain; {quote_log(life)}")
        elif code != SUPERSEDED or not self.is_open(w):  # whoever took over is found by its lease
            self.delay_restart(w, f"{describe_exit(code)}; {quote_log(life)}")

    def bury(self, w: Watched, life: Life, code: int) -> None:
        w.life, w.draining = None, None
        self.next_look = 0.0
        severity = "info" if code in (FINISHED, STOPPED) else "warning"
        how = f"{describe_exit(code)}{why_it_ended(life, code)}"
        self.tell("role-ended", f"{w.role.name}, life {life.number}, {how}", severity, w=w, code=code)
        try:
            self.launcher.ended(life)
        except StorageError as error:
            self.tell("log-not-stored", f"the log of {w.role.name} stays at {life.where}: {error}", "warning", w=w)

    def delay_restart(self, w: Watched, how: str) -> None:
        now, window, allowed = time.monotonic(), self.limits.restart_window, self.limits.max_restarts
        w.ends.append(now)
        while now - w.ends[0] > window:
            w.ends.popleft()
        w.in_vain += 1
        if len(w.ends) > allowed:
            raise RunFailed(f"{w.role.name} ended {len(w.ends)} times within {window:.0f} s, the last time {how}")
        if w.in_vain > allowed:
            raise RunFailed(f"{w.role.name} ended {w.in_vain} times without getting any further, the last time {how}")
        if w.killed is not None and not has_begun(self.seen.get(w.role.name), w.life_before):
            w.never_began += 1
            if w.never_began > 1:
                raise RunFailed(f"{w.role.name} took no lease in {self.launcher.start_deadline:.0f} s, twice; {how}")
        delay = min(self.first_delay * 2 ** (len(w.ends) - 1), LONGEST_DELAY)
        w.not_before = now + delay
        self.tell("role-restarting", f"{w.role.name} is started again in {delay:g} s", "warning", w=w)

    def lives_elsewhere(self, w: Watched) -> bool:
        """Whether a life that this supervisor did not start goes on, or may: it is adopted once its lease has moved,
        and replaced once that has been silent for too long."""
        seen = self.seen.get(w.role.name)
        if seen is None:
            return False
        if self.is_open(w) and not self.is_silent(w):
            mark = (seen.lease.life, seen.lease.counter)
            w.first_seen = w.first_seen or mark
            if mark != w.first_seen and not w.adopted:
                w.adopted, w.number = True, seen.lease.life
                self.tell("role-adopted", f"{w.role.name} lives: pid {seen.lease.pid} on {seen.lease.host}", w=w)
            return True
        if self.is_open(w):
            if w.told_silent != seen.lease.life:
                w.told_silent = seen.lease.life
                self.tell("role-silent", f"{w.role.name} {say_silent(seen)}", "warning", w=w)
            signal_role(w.role, seen.lease, self.run.name, signal.SIGKILL)
        w.finished, w.first_seen = seen.lease.status == "finished", None
        if w.adopted:
            how = self.bury_adopted(w, seen.lease)
            if not w.finished:
                self.delay_restart(w, f"it was {how} (pid {seen.lease.pid} on {seen.lease.host})")
        return False

    def bury_adopted(self, w: Watched, lease: Lease) -> str:
        w.adopted = False
        how = lease.status if lease.status in CLOSED else "gone"
        severity = "warning" if how in ("gone", "failed") else "info"
        self.tell("role-ended", f"{w.role.name}, which was adopted, is {how}", severity, w=w)
        return how

    # Stopping them

    def drain(self, w: Watched) -> None:
        """See to it that a searcher too many ends. It hears of that by itself, wherever it lives, and is made to only
        if it does not: on another machine SIGTERM leaves it less time than a round may take."""
        if w.life and (code := self.end_of(w, w.life)) is not None:
            self.bury(w, w.life, code)
        if not self.is_alive(w):
            if w.adopted:
                self.bury_adopted(w, self.seen[w.role.name].lease)
            w.draining, w.finished = None, False
        elif w.draining is None:
            w.draining = patience(self.limits)
            why = DONE_LEARNING if self.know(Role("trainer")).finished else f"one too many of {self.state.searchers}"
            self.tell("role-draining", f"{w.role.name} is asked to stop: {why}", w=w)
        else:
            w.draining.look(self.seen.get(w.role.name))
            if w.draining.is_over:
                is_late = time.monotonic() - w.draining.began > w.draining.seconds + self.launcher.end_grace
                self.signal(w, signal.SIGKILL if is_late else signal.SIGTERM)

    def stop(self, why: str, within: float | None = None) -> None:
        """The ladder: what is wanted, then SIGTERM, then SIGKILL. Each rung ends as soon as nobody is left, the first
        after as long as the roles need by what they say."""
        self.tell("run-stopping", f"stopping: {why}{forecast(self.seen_open())}")
        stopping, end_grace = Stopping(self.limits), self.launcher.end_grace
        if within is not None:
            stopping, end_grace = Stopping(self.limits, 0.7 * within), min(end_grace, 0.2 * within)
        if cut_short := stopping.cut_short(self.seen_open()):
            self.tell("stop-cut-short", cut_short, "warning")
        was_asked = self.ask_to_stop(why)
        left = self.await_ends(stopping) if was_asked else self.alive()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for w in left:
                self.tell("role-stopping", f"{w.role.name} still runs: {number.name}", "warning", w=w)
                self.signal(w, number)
            is_first_word = number == signal.SIGTERM and not was_asked
            left = self.await_ends(stopping if is_first_word else end_grace)
        for w in left:
            self.tell("role-left", f"{w.role.name} could not be stopped from here", "error", w=w)
        try:
            self.launcher.close()
        except StorageError as error:
            self.tell("log-not-stored", f"some logs stay on this host: {error}", "warning")

    def ask_to_stop(self, why: str) -> bool:
        """Say in the run's state that it is to stop; False if that cannot be written."""
        try:
            self.wanted_state.change(desired="stop", why=why)
        except StorageError as error:
            self.on_event(Event("store-trouble", f"the roles are stopped without being asked: {error}", "warning"))
            return False
        return True

    def await_ends(self, stopping: Stopping | float) -> list[Watched]:
        """Wait until every role has ended, until the patience with each role is over, or for `stopping` seconds. Return
        the roles that still live."""
        began = time.monotonic()

        def is_over(w: Watched) -> bool:
            if isinstance(stopping, Stopping):
                return stopping.is_over(w.role.name, self.seen.get(w.role.name))
            return time.monotonic() > began + stopping

        while True:
            for w in self.watched.values():
                if w.life and (code := self.end_of(w, w.life)) is not None:
                    self.bury(w, w.life, code)
            if time.monotonic() >= self.next_look:
                try:
                    self.look()
                    self.store_alarm.look([])
                except StorageError as error:
                    self.store_alarm.look([Alarm("store-trouble", str(error))])
                    self.next_look = time.monotonic() + self.limits.lease_every
            for w in self.watched.values():
                if w.adopted and not self.is_alive(w):
                    self.bury_adopted(w, self.seen[w.role.name].lease)
            left = self.alive()
            overs = [is_over(w) for w in left]  # of each, as the patience with it begins when it is first asked for
            if all(overs):
                return left
            time.sleep(POLL)

    def signal(self, w: Watched, number: signal.Signals) -> None:
        if w.life and number == signal.SIGKILL:
            w.life.kill()
        elif w.life:
            w.life.terminate()
        elif w.role.name in self.seen:
            signal_role(w.role, self.seen[w.role.name].lease, self.run.name, number)

    def let_go(self) -> None:
        for w in self.watched.values():
            if w.life:
                w.life.let_go()

    def tell(self, kind: str, message: str, severity: str = "info", *, w: Watched | None = None, **data: Any) -> None:
        about = {"of": w.role.name, "life": w.number, **data} if w else data
        self.events.write(kind, message, severity=severity, **about)
        self.on_event(Event(kind, message, severity, about))

    def tell_of_store(self, kind: str, message: str, severity: str, **data: Any) -> None:
        """Nothing of it is stored: it would have to wait for the store."""
        self.on_event(Event(kind, message, severity, data))


def _is_open(lease: Lease) -> bool:
    return lease.status not in CLOSED and not is_gone(lease)
