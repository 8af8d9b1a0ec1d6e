"""Keep one role of a run alive: start it, adopt a life that is already there, kill a life that hangs, and restart."""

import signal
import time
from collections.abc import Callable

from flows.supervision.interfaces import CLOSED, Launcher
from flows.supervision.last_words import describe_exit, quote_log, refusal_in_log, why_it_ended
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
from flows.supervision.role_states import Started, Watched, WatchedRoles
from flows.supervision.silence import hangs, say_silent
from flows.supervision.stopping import Draining, RepeatedKill
from storage.runs.lease_watch import Seen
from storage.runs.run import Run
from tba.config import LimitsConfig
from tba.errors import RunFailed, StorageError

PATIENCE = 30.0  # seconds after which an event reports that a life has not begun
DONE_LEARNING = "the trainer has finished"  # why searchers are asked to stop while the last version is scored


class RoleKeeper:
    """Acts on the state of a role through the launcher, and reports by `tell(kind, message, severity, **data)`. Each
    call looks at the role once and never waits for it."""

    def __init__(
        self, run: Run, launcher: Launcher, limits: LimitsConfig, roles: WatchedRoles, tell: Callable[..., None]
    ):
        self.run, self.launcher, self.limits, self.roles, self.tell = run, launcher, limits, roles, tell

    def attend(self, w: Watched) -> None:
        """Do what a wanted role needs now: start or adopt a life, kill a life that hangs, or react to the end of a
        life."""
        if w.is_finished:
            return
        if isinstance(started := w.state, Started):
            self._attend_started(w, started)
            return
        if (seen := self.roles.lease_of(w)) is None:
            w.end()
        elif self.roles.moves(w):
            if w.follow(seen.lease):
                message = f"{w.name} is adopted: pid {seen.lease.pid} on {seen.lease.host}"
                self.tell("role-adopted", message, **w.about)
        else:
            self._replace(w, seen)
        if w.may_start(time.monotonic()):
            self._start(w)

    def drain(self, w: Watched) -> None:
        """Make a searcher stop that is not wanted any more, and clean up after it. The searcher, on any machine, reads
        in the wanted state that it has to stop. It gets a signal only if it does not stop in time: on another machine,
        SIGTERM would leave it less time than a round may take."""
        self.bury_ended(w)
        if not self.roles.is_alive(w):
            self.bury_adopted(w)
            w.forget()
        elif w.draining is None:
            w.draining = Draining(self.limits, self.launcher.end_grace)
            too_many = f"the run wants only {self.roles.state.searchers} searcher(s)"
            why = DONE_LEARNING if self.roles.has_learned() else too_many
            self.tell("role-draining", f"{w.name} is asked to stop: {why}", **w.about)
        elif number := w.draining.due_signal(self.roles.lease_of(w)):
            self.signal(w, number)

    def signal(self, w: Watched, number: signal.Signals) -> None:
        """Send SIGTERM or SIGKILL to the living process of the role, if it can be reached from this host."""
        if w.life and number == signal.SIGKILL:
            w.life.kill()
        elif w.life:
            w.life.terminate()
        elif seen := self.roles.lease_of(w):
            signal_role(w.role, seen.lease, self.run.name, number)

    def bury_ended(self, w: Watched) -> None:
        """Clean up after the life that the supervisor has started, if it has ended."""
        if isinstance(started := w.state, Started) and (code := self._exit_code(w, started)) is not None:
            self._bury(w, started, code)

    def bury_adopted(self, w: Watched) -> str:
        """Report the end of an adopted life that is not alive any more. Return how it ended, or an empty string if no
        life was adopted."""
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
        """Return the exit code of a life that has ended, else None. The code comes from the launcher. If the launcher
        has not noticed the end `last_word_after` seconds after the role closed its lease, the code follows from the
        lease's status."""
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
            self.tell("role-lost", f"{w.name} could not be killed: {life.where}", "error", **w.about)
            self._delay_restart(w, f"it could not be killed; {quote_log(life)}", started)
        elif kill.is_due(now):
            life.kill()

    def _react_to_end(self, w: Watched, started: Started, code: int) -> None:
        # Read the role's last status, and the wanted state, which the role may have read before this supervisor.
        self.roles.look()
        was_asked = w.draining is not None
        self._bury(w, started, code)
        if w.role not in self.roles.wanted() or was_asked:  # if the role is wanted again, `attend` starts it
            return
        seen, life = self.roles.lease_of(w), started.life
        if code == FINISHED or (seen and started.has_begun(seen) and seen.lease.status == "finished"):
            w.finish()
        elif code == MISUSED:
            raise RunFailed(f"{w.name} cannot work with its settings or data; {refusal_in_log(life)}")
        elif code == GAVE_UP:
            raise RunFailed(f"{w.name} has waited too long for another role; {quote_log(life)}")
        elif code != SUPERSEDED or not self.roles.is_open(w):  # a life that took over is found by its lease
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
            message = f"the log of {w.name} could not be stored and stays on its host ({life.where}): {error}"
            self.tell("log-not-stored", message, "warning", **w.about)

    # Its next life

    def _start(self, w: Watched) -> None:
        if w.role not in self.roles.wanted():
            return  # the trainer has finished since `attend` was called
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
        """Note that the role cannot be started now. Report each new reason once. Raise RunFailed after
        `limits.data_deadline` seconds."""
        waited, is_new = w.refuse(reason, now, self.limits.lease_every)
        if is_new:
            self.tell("role-waiting", f"{w.name} cannot start yet: {reason}", "warning", **w.about)
        if waited > self.limits.data_deadline:
            raise RunFailed(f"{w.name} could not be started for {waited:.0f} s: {reason}")

    def _replace(self, w: Watched, seen: Seen) -> None:
        """Handle a lease that is closed or silent and belongs to a process that this supervisor has not started. If the
        lease says `finished`, the role is finished. In all other cases the life of the role counts as ended, so the
        role is started again; if the lease is silent and its process is on this host, the process is killed first."""
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
        """Count one end of the role, and report after how many seconds the role is started again. `started` is its
        latest life, if this supervisor has started that life."""
        never_began = started and started.kill and not started.has_begun(self.roles.lease_of(w))
        without_lease = self.launcher.start_deadline if never_began else None
        delay = w.restarts.spend(w.name, how, time.monotonic(), seconds_without_lease=without_lease)
        self.tell("role-restarting", f"{w.name} is started again in {delay:g} s", "warning", **w.about)
