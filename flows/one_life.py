"""One life of a role, started and watched on the host it runs on, for a supervisor that is elsewhere."""

import time
from collections.abc import Callable

from flows.processes import FAILED, STOPPED, NotNow, Role
from flows.supervise import POLL, Event, Launcher, Life, StopRequest, hangs
from storage.leases import LeaseWatch, read_lease
from storage.run import Run
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
    """One life of a role, watched from the host it runs on until it ends: its exit code and its last words. Whether
    it is started again is for the supervisor of the run to say."""
    before = read_lease(run, role.name)
    life = _start_when_possible(launcher, limits, role, number, should_stop, on_event)
    if life is None:
        return STOPPED, ""
    began = next_look = time.monotonic()
    watch, kill_at = LeaseWatch(), float("inf")
    while (code := life.poll()) is None:
        now = time.monotonic()
        if kill_at == float("inf") and (request := should_stop()):
            on_event(Event("role-stopping", f"{role.name} is asked to stop: {request.why}"))
            life.terminate()
            kill_at = now + (limits.stop_grace if request.within is None else 0.8 * request.within)
        if now > kill_at:
            life.kill()
        if now > kill_at + launcher.end_grace:
            life.let_go()
            return FAILED, f"it could not be ended: {life.where}"
        if now >= next_look:
            next_look = now + limits.lease_every
            try:
                seen = watch.observe(run).get(role.name)
            except StorageError as error:  # the store's silence says nothing about the role
                watch = LeaseWatch()
                on_event(Event("store-trouble", str(error), "warning"))
            else:
                why = hangs(seen, before.life if before else 0, now - began, limits, launcher)
                if why and kill_at > now:
                    on_event(Event("role-silent", f"{role.name} {why}", "warning"))
                    kill_at = now
        time.sleep(POLL)
    try:
        launcher.ended(life)
    except StorageError as error:
        on_event(Event("log-not-stored", f"the log of {role.name} stays at {life.where}: {error}", "warning"))
    return code, life.last_words()


def _start_when_possible(
    launcher: Launcher,
    limits: LimitsConfig,
    role: Role,
    number: int,
    should_stop: Callable[[], StopRequest | None],
    on_event: Callable[[Event], None],
) -> Life | None:
    """None if it was asked to stop before it could be started."""
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
