"""Keeps one role of a run alive: starts it, judges whether it hangs, ends it, adopts it and starts it again."""

import signal
import time
from collections.abc import Callable

from flows.supervision.last_words import describe_exit, quote_log, refusal_in_log, why_it_ended
from flows.supervision.life import CLOSED, Launcher, hangs, say_silent
from flows.supervision.processes import (
    FINISHED,
    GAVE_UP,
    MISUSED,
    STOPPED,
    SUPERSEDED,
    NotNow,
    last_life,
    signal_role,
)
from flows.supervision.stopping import Draining, RepeatedKill
from flows.supervision.watched import Started, Watched, WatchedRoles
from storage.runs.leases import Seen
from storage.runs.run import Run
from tba.config import LimitsConfig
from tba.errors import RunFailed, StorageError

PATIENCE = 30.0  # seconds after which a life that has not begun is spoken of
DONE_LEARNING = "the trainer has finished"  # why searchers are asked to stop while the last version is scored


class RoleKeeper:
    """Does what the state of a role asks for, through the launcher, and says so by `tell(kind, message, severity,
    **data)`. Each call looks at the role once and never waits for it."""

    def __init__(
        self, run: Run, launcher: Launcher, limits: LimitsConfig, roles: WatchedRoles, tell: Callable[..., None]
    ):
        self.run, self.launcher, self.limits, self.roles, self.tell = run, launcher, limits, roles, tell

    def attend(self, w: Watched) -> None:
        """Keep a role alive that is wanted."""
        if w.is_finished:
            return
        if isinstance(started := w.state, Started):
            self._attend_started(w, started)
            return
        if (seen := self.roles.lease_of(w)) is None:
            w.end()
        elif self.roles.moves(w):
            if w.follow(seen.lease):
                message = f"{w.name} lives: pid {seen.lease.pid} on {seen.lease.host}"
                self.tell("role-adopted", message, **w.about)
        else:
            self._replace(w, seen)
        if w.may_start(time.monotonic()):
            self._start(w)

    def drain(self, w: Watched) -> None:
        """See to it that a searcher too many ends. It hears of that by itself, wherever it lives, and is made to only
        if it does not: on another machine SIGTERM leaves it less time than a round may take."""
        self.bury_ended(w)
        if not self.roles.is_alive(w):
            self.bury_adopted(w)
            w.forget()
        elif w.draining is None:
            w.draining = Draining(self.limits, self.launcher.end_grace)
            too_many = f"one too many of {self.roles.state.searchers}"
            why = DONE_LEARNING if self.roles.has_learned() else too_many
            self.tell("role-draining", f"{w.name} is asked to stop: {why}", **w.about)
        elif number := w.draining.due_signal(self.roles.lease_of(w)):
            self.signal(w, number)

    def signal(self, w: Watched, number: signal.Signals) -> None:
        """Send SIGTERM or SIGKILL to whoever lives as the role, if it can be reached from here."""
        if w.life and number == signal.SIGKILL:
            w.life.kill()
        elif w.life:
            w.life.terminate()
        elif seen := self.roles.lease_of(w):
            signal_role(w.role, seen.lease, self.run.name, number)

    def bury_ended(self, w: Watched) -> None:
        """Tidy up after the life that the supervisor has started, if it has ended."""
        if isinstance(started := w.state, Started) and (code := self._exit_code(w, started)) is not None:
            self._bury(w, started, code)

    def bury_adopted(self, w: Watched) -> str:
        """Say that an adopted life, which is not alive any more, has ended. Return how; empty if none was adopted."""
        seen = self.roles.lease_of(w)
        if not w.is_adopted or seen is None:
            return ""
        w.end()
        how = seen.lease.status if seen.lease.status in CLOSED else "gone"
        severity = "warning" if how in ("gone", "failed") else "info"
        self.tell("role-ended", f"{w.name}, which was adopted, is {how}", severity, **w.about)
        return how

    # A life that the supervisor has started

    def _attend_started(self, w: Watched, started: Started) -> None:
        if (code := self._exit_code(w, started)) is not None:
            self._react_to_end(w, started, code)
        elif started.kill is None:
            self._judge(w, started)
        else:
            self._insist(w, started, started.kill)

    def _exit_code(self, w: Watched, started: Started) -> int | None:
        """The exit code of a life that has ended: as whoever watches it there says, or as the role itself has said
        where nobody watches it any more."""
        code, seen = started.life.poll(), self.roles.lease_of(w)
        if code is None and seen and started.has_begun(seen) and seen.silent_for > self.launcher.last_word_after:
            return CLOSED.get(seen.lease.status)
        return code

    def _judge(self, w: Watched, started: Started) -> None:
        seen, now, life = self.roles.lease_of(w), time.monotonic(), started.life
        if why := hangs(seen, started.life_before, now - started.since, self.limits, self.launcher):
            started.kill = RepeatedKill(now)
            self.tell("role-silent", f"{w.name} {why}", "warning", **w.about)
            life.kill()
        elif started.has_begun(seen):
            w.restarts.note_lease()
        elif not started.told_waiting and now - started.since > PATIENCE and life.waits_for:
            started.told_waiting = True
            self.tell("role-waiting", f"{w.name} has not begun yet: {life.waits_for}", "warning", **w.about)

    def _insist(self, w: Watched, started: Started, kill: RepeatedKill) -> None:
        now, life = time.monotonic(), started.life
        if kill.is_lost(now, self.launcher.end_grace):
            life.let_go()
            w.end()
            self.roles.look_soon()
            self.tell("role-lost", f"{w.name} could not be ended: {life.where}", "error", **w.about)
            self._delay_restart(w, f"it was lost; {quote_log(life)}", started)
        elif kill.is_due(now):
            life.kill()

    def _react_to_end(self, w: Watched, started: Started, code: int) -> None:
        self.roles.look()  # at its last word, and at what is wanted: the role may have heard of that first
        was_asked = w.draining is not None
        self._bury(w, started, code)
        if w.role not in self.roles.wanted() or was_asked:  # and is wanted again, perhaps
            return
        seen, life = self.roles.lease_of(w), started.life
        if code == FINISHED or (seen and started.has_begun(seen) and seen.lease.status == "finished"):
            w.finish()
        elif code == MISUSED:
            raise RunFailed(f"{w.name} cannot do what it was asked to; {refusal_in_log(life)}")
        elif code == GAVE_UP:
            raise RunFailed(f"{w.name} has waited in vain; {quote_log(life)}")
        elif code != SUPERSEDED or not self.roles.is_open(w):  # whoever took over is found by its lease
            self._delay_restart(w, f"{describe_exit(code)}; {quote_log(life)}", started)

    def _bury(self, w: Watched, started: Started, code: int) -> None:
        life = started.life
        w.end()
        self.roles.look_soon()
        severity = "info" if code in (FINISHED, STOPPED) else "warning"
        how = f"{describe_exit(code)}{why_it_ended(life, code)}"
        self.tell("role-ended", f"{w.name}, life {life.number}, {how}", severity, **w.about, code=code)
        try:
            self.launcher.ended(life)
        except StorageError as error:
            message = f"the log of {w.name} stays at {life.where}: {error}"
            self.tell("log-not-stored", message, "warning", **w.about)

    # Its next life

    def _start(self, w: Watched) -> None:
        if w.role not in self.roles.wanted():
            return  # the trainer has finished a moment ago
        seen, now = self.roles.lease_of(w), time.monotonic()
        life_before = seen.lease.life if seen else 0
        number = max(w.number, life_before, last_life(self.run, w.role)) + 1
        try:
            life = self.launcher.start(w.role, number)
        except NotNow as reason:
            self._postpone(w, str(reason), now)
            return
        w.start(life, life_before, now)
        self.tell("role-started", f"{w.name}, life {w.number}: {life.where}", **w.about)

    def _postpone(self, w: Watched, reason: str, now: float) -> None:
        """The role cannot be started: say so once, and try again, until the deadline."""
        waited, is_new = w.refuse(reason, now, self.limits.lease_every)
        if is_new:
            self.tell("role-waiting", f"{w.name} cannot start yet: {reason}", "warning", **w.about)
        if waited > self.limits.data_deadline:
            raise RunFailed(f"{w.name} could not be started for {waited:.0f} s: {reason}")

    def _replace(self, w: Watched, seen: Seen) -> None:
        """Settle that nobody lives behind a lease which this supervisor has not given out, or not any more: its role
        has finished, or is to be started again. A process that is silent is killed if it is one of this host."""
        if self.roles.is_open(w):
            if w.told_silent != seen.lease.life:
                w.told_silent = seen.lease.life
                self.tell("role-silent", f"{w.name} {say_silent(seen)}", "warning", **w.about)
            signal_role(w.role, seen.lease, self.run.name, signal.SIGKILL)
        how = self.bury_adopted(w)
        if seen.lease.status == "finished":
            w.finish()
            return
        w.end()
        if how:
            self._delay_restart(w, f"it was {how} (pid {seen.lease.pid} on {seen.lease.host})")

    def _delay_restart(self, w: Watched, how: str, started: Started | None = None) -> None:
        """Spend one restart of the role, whose latest life was `started`, if the supervisor has started it."""
        never_began = started and started.kill and not started.has_begun(self.roles.lease_of(w))
        without_lease = self.launcher.start_deadline if never_began else None
        delay = w.restarts.spend(w.name, how, time.monotonic(), seconds_without_lease=without_lease)
        self.tell("role-restarting", f"{w.name} is started again in {delay:g} s", "warning", **w.about)
