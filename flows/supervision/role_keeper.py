"""Keep one role of a run alive: start it, adopt a life that is already there, kill a life that hangs, and restart."""

import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from flows.supervision.interfaces import CLOSED, Launcher, Life
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

ERROR_LINE = re.compile(r"^(?:\S+ \S+ \S+ ERROR|ERROR:?|error:) (.+)$", re.MULTILINE)
"""An error in a log, as roles and most other programs write it."""


class RoleKeeper:
    """Acts on the state of a role through the launcher, and reports by `tell(kind, message, severity, **data)`. Each
    call looks at the role once and never waits for it."""

    def __init__(
        self, run: Run, launcher: Launcher, limits: LimitsConfig, roles: WatchedRoles, tell: Callable[..., None]
    ):
        self.run, self.launcher, self.limits, self.roles, self.tell = run, launcher, limits, roles, tell

    def attend(self, watched: Watched) -> None:
        """Do what a wanted role needs now: start or adopt a life, kill a life that hangs, or react to the end of a
        life."""
        if watched.is_finished:
            return
        if isinstance(started := watched.state, Started):
            self._attend_started(watched, started)
            return
        if (seen := self.roles.lease_of(watched)) is None:
            watched.end()
        elif self.roles.moves(watched):
            if watched.follow(seen.lease):
                message = f"{watched.name} is adopted: pid {seen.lease.pid} on {seen.lease.host}"
                self.tell("role-adopted", message, **watched.about)
        else:
            self._replace(watched, seen)
        if watched.may_start(time.monotonic()):
            self._start(watched)

    def drain(self, watched: Watched) -> None:
        """Make a searcher stop that is not wanted any more, and clean up after it. The searcher, on any machine, reads
        in the wanted state that it has to stop. It gets a signal only if it does not stop in time: on another machine,
        SIGTERM would leave it less time than a round may take."""
        self.bury_ended(watched)
        if not self.roles.is_alive(watched):
            self.bury_adopted(watched)
            watched.forget()
        elif watched.draining is None:
            watched.draining = Draining(self.limits, self.launcher.end_grace)
            too_many = f"the run wants only {self.roles.state.searchers} searcher(s)"
            why = DONE_LEARNING if self.roles.has_learned() else too_many
            self.tell("role-draining", f"{watched.name} is asked to stop: {why}", **watched.about)
        elif number := watched.draining.due_signal(self.roles.lease_of(watched)):
            self.signal(watched, number)

    def signal(self, watched: Watched, number: signal.Signals) -> None:
        """Send SIGTERM or SIGKILL to the living process of the role, if it can be reached from this host."""
        if watched.life and number == signal.SIGKILL:
            watched.life.kill()
        elif watched.life:
            watched.life.terminate()
        elif seen := self.roles.lease_of(watched):
            signal_role(watched.role, seen.lease, self.run.name, number)

    def bury_ended(self, watched: Watched) -> None:
        """Clean up after the life that the supervisor has started, if it has ended."""
        if isinstance(started := watched.state, Started) and (code := self._exit_code(watched, started)) is not None:
            self._bury(watched, started, code)

    def bury_adopted(self, watched: Watched) -> str:
        """Report the end of an adopted life that is not alive any more. Return how it ended, or an empty string if no
        life was adopted."""
        seen = self.roles.lease_of(watched)
        if not watched.is_adopted or seen is None:
            return ""
        watched.end()
        how = seen.lease.status if seen.lease.status in CLOSED else "gone"
        severity = "warning" if how in ("gone", "failed") else "info"
        self.tell("role-ended", f"{watched.name}, which was adopted, is {how}", severity, **watched.about)
        return how

    # A life that the supervisor has started

    def _attend_started(self, watched: Watched, started: Started) -> None:
        if (code := self._exit_code(watched, started)) is not None:
            self._react_to_end(watched, started, code)
        elif started.kill is None:
            self._judge(watched, started)
        else:
            self._insist(watched, started, started.kill)

    def _exit_code(self, watched: Watched, started: Started) -> int | None:
        """Return the exit code of a life that has ended, else None. The code comes from the launcher. If the launcher
        has not noticed the end `last_word_after` seconds after the role closed its lease, the code follows from the
        lease's status."""
        code, seen = started.life.poll(), self.roles.lease_of(watched)
        if code is None and seen and started.has_begun(seen) and seen.silent_for > self.launcher.last_word_after:
            return CLOSED.get(seen.lease.status)
        return code

    def _judge(self, watched: Watched, started: Started) -> None:
        seen, now, life = self.roles.lease_of(watched), time.monotonic(), started.life
        if why := hangs(seen, started.life_before, now - started.since, self.limits, self.launcher):
            started.kill = RepeatedKill(now)
            self.tell("role-silent", f"{watched.name} {why}", "warning", **watched.about)
            life.kill()
        elif started.has_begun(seen):
            watched.restarts.note_lease()
        elif not started.told_waiting and now - started.since > PATIENCE and life.waits_for:
            started.told_waiting = True
            self.tell("role-waiting", f"{watched.name} has not begun yet: {life.waits_for}", "warning", **watched.about)

    def _insist(self, watched: Watched, started: Started, kill: RepeatedKill) -> None:
        now, life = time.monotonic(), started.life
        if kill.is_lost(now, self.launcher.end_grace):
            life.let_go()
            watched.end()
            self.roles.look_soon()
            self.tell("role-lost", f"{watched.name} could not be killed: {life.where}", "error", **watched.about)
            self._delay_restart(watched, f"it could not be killed; {_quote_log(life)}", started)
        elif kill.is_due(now):
            life.kill()

    def _react_to_end(self, watched: Watched, started: Started, code: int) -> None:
        # Read the role's last status, and the wanted state, which the role may have read before this supervisor.
        self.roles.read_leases()
        was_asked = watched.draining is not None
        self._bury(watched, started, code)
        if watched.role not in self.roles.wanted() or was_asked:  # if the role is wanted again, `attend` starts it
            return
        seen, life = self.roles.lease_of(watched), started.life
        if code == FINISHED or (seen and started.has_begun(seen) and seen.lease.status == "finished"):
            watched.finish()
        elif code == MISUSED:
            raise RunFailed(f"{watched.name} cannot work with its settings or data; {_refusal_in_log(life)}")
        elif code == GAVE_UP:
            raise RunFailed(f"{watched.name} has waited too long for another role; {_quote_log(life)}")
        elif code != SUPERSEDED or not self.roles.is_open(watched):  # a life that took over is found by its lease
            self._delay_restart(watched, f"{_describe_exit(code)}; {_quote_log(life)}", started)

    def _bury(self, watched: Watched, started: Started, code: int) -> None:
        life = started.life
        watched.end()
        self.roles.look_soon()
        severity = "info" if code in (FINISHED, STOPPED) else "warning"
        how = f"{_describe_exit(code)}{_why_it_ended(life, code)}"
        self.tell("role-ended", f"{watched.name}, life {life.number}, {how}", severity, **watched.about, code=code)
        try:
            self.launcher.ended(life)
        except StorageError as error:
            message = f"the log of {watched.name} could not be stored and stays on its host ({life.where}): {error}"
            self.tell("log-not-stored", message, "warning", **watched.about)

    # Its next life

    def _start(self, watched: Watched) -> None:
        if watched.role not in self.roles.wanted():
            return  # the trainer has finished since `attend` was called
        seen, now = self.roles.lease_of(watched), time.monotonic()
        if watched.is_external:
            self._postpone(watched, "something else has to start it (--external-trainer)", now)
            return
        life_before = seen.lease.life if seen else 0
        number = max(watched.number, life_before, last_life(self.run, watched.role)) + 1
        try:
            life = self.launcher.start(watched.role, number)
        except NotNow as reason:
            self._postpone(watched, str(reason), now)
            return
        watched.start(life, life_before, now)
        self.tell("role-started", f"{watched.name}, life {watched.number}: {life.where}", **watched.about)

    def _postpone(self, watched: Watched, reason: str, now: float) -> None:
        """Note that the role cannot be started now. Report each new reason once. Raise RunFailed after
        `limits.data_deadline` seconds."""
        waited, is_new = watched.refuse(reason, now, self.limits.lease_every)
        if is_new:
            severity = "info" if watched.is_external else "warning"
            self.tell("role-waiting", f"{watched.name} cannot start yet: {reason}", severity, **watched.about)
        if waited > self.limits.data_deadline:
            raise RunFailed(f"{watched.name} could not be started for {waited:.0f} s: {reason}")

    def _replace(self, watched: Watched, seen: Seen) -> None:
        """Handle a lease that is closed or silent and belongs to a process that this supervisor has not started. If the
        lease says `finished`, the role is finished. In all other cases the life of the role counts as ended, so the
        role is started again; if the lease is silent and its process is on this host, the process is killed first."""
        if self.roles.is_open(watched):
            if watched.told_silent != seen.lease.life:
                watched.told_silent = seen.lease.life
                self.tell("role-silent", f"{watched.name} {say_silent(seen)}", "warning", **watched.about)
            signal_role(watched.role, seen.lease, self.run.name, signal.SIGKILL)
        how = self.bury_adopted(watched)
        if seen.lease.status == "finished":
            watched.finish()
            return
        watched.end()
        if how:
            self._delay_restart(watched, f"it was {how} (pid {seen.lease.pid} on {seen.lease.host})")

    def _delay_restart(self, watched: Watched, how: str, started: Started | None = None) -> None:
        """Count one end of the role, and report after how many seconds the role is started again. `started` is its
        latest life, if this supervisor has started that life. A role that something else starts is only waited for."""
        if watched.is_external:
            return
        never_began = started and started.kill and not started.has_begun(self.roles.lease_of(watched))
        without_lease = self.launcher.start_deadline if never_began else None
        delay = watched.restarts.spend(watched.name, how, time.monotonic(), seconds_without_lease=without_lease)
        self.tell("role-restarting", f"{watched.name} is started again in {delay:g} s", "warning", **watched.about)


# --- why a role has ended ---------------------------------------------------------------------------------------------


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    known = {FINISHED: "finished", STOPPED: "stopped", SUPERSEDED: "superseded by another life of the role"}
    return known.get(code, f"failed with exit code {code}")


def _why_it_ended(life: Life, code: int) -> str:
    """Return the last error in the log of a role that failed, or its last line if there is no error. Return an empty
    string if the role did not fail by itself."""
    if code in (STOPPED, SUPERSEDED) or code <= FINISHED:  # negative codes are signals
        return ""
    words = ""
    with suppress(StorageError):  # the log may be in remote storage
        words = life.last_words()
    last = _error_of(words) or words.rstrip().rpartition("\n")[2]
    return f": {last}" if last else ""


def _quote_log(life: Life) -> str:
    """Return the last error in the log of a life, where the life ran, and the last lines of the log."""
    words = life.last_words()
    error = _error_of(words)
    where = f"{error}; {life.where}" if error else life.where
    return f"{where}; the end of its log:\n{words}" if words else f"{where}; its log is empty"


def _refusal_in_log(life: Life) -> str:
    """Return the last error in the log of a life, and where the life ran. A role that refuses its settings or data logs
    an error that explains itself. If the log has no error, also return the last lines of the log."""
    error = _error_of(life.last_words())
    return f"{error}; {life.where}" if error else _quote_log(life)


def _error_of(words: str) -> str:
    """Return the message of the last error in a log, or an empty string."""
    return next(reversed(ERROR_LINE.findall(words)), "")
