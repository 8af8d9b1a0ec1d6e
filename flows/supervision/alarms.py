"""Detect problems that do not end a role: a supervisor sees them in the leases of the run's roles."""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flows.supervision.processes import Role
from storage.runs.lease_watch import LeaseWatch, Seen
from storage.runs.leases import DAMAGED, Lease
from tba.alarms import Alarm
from tba.config import AlarmsConfig

SLOWER = 4.0
"""How many times as long as usual a role may take for a step or a shard before it counts as stalled."""


@dataclass
class _Course:
    """How far a role has got, and since when. All times are those of `time.monotonic`."""

    life: int
    far: float  # how far the role has got, see `how_far`
    since: float  # the moment when it got there
    version: float | None = None  # the version with which it generates
    behind_since: float | None = None  # the moment when a newer version than this one was first seen
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds that its last advances took

    def patience(self, least: float) -> float:
        """Return `least` seconds, or more if the role is slow: several times as long as its recent advances took. The
        first advance alone does not count, because the role may have waited long for others before it."""
        return max(least, SLOWER * statistics.median_low(self.steps)) if len(self.steps) > 1 else least


class OperatingAlarms:
    def __init__(self, config: AlarmsConfig, *, lag: int = 0):
        self.config, self.lag = config, lag  # lag: by how many versions searchers are behind on purpose
        self.courses: dict[str, _Course] = {}

    def find(self, seen: Mapping[str, Seen]) -> list[Alarm]:
        """Return the alarms about roles and disks that hold now. `seen` has the leases of roles that may be alive."""
        now = time.monotonic()
        for name in self.courses.keys() - seen.keys():
            del self.courses[name]
        newest = self._newest_version(seen)
        alarms = [alarm for name, it in seen.items() for alarm in self._of_role(name, it, newest, now)]
        return alarms + self._disks(seen)

    def _of_role(self, name: str, seen: Seen, newest: float | None, now: float) -> Iterator[Alarm]:
        lease, config = seen.lease, self.config
        if config.late_after and seen.silent_for > config.late_after:
            message = f"{name} has not renewed its lease for {seen.silent_for:.0f} s (pid {lease.pid} on {lease.host})"
            yield Alarm("role-late", f"{message}, its last status is {lease.status!r}", name)
        role = Role.parse(name)
        if role is None or role.kind == "evaluator":  # an evaluator may wait long for a version
            return
        course = self._follow(name, lease, newest, now)
        if config.stalled_after and now - course.since > course.patience(config.stalled_after):
            message = f"{name} has made no progress for {now - course.since:.0f} s (alarms.stalled_after)"
            yield Alarm("role-stalled", f"{message}: {lease.status}", name)
        adopted_within = course.patience(config.adopted_within)
        if config.adopted_within and course.behind_since and now - course.behind_since > adopted_within:
            behind = f"{now - course.behind_since:.0f} s after a newer one was published (now {newest:g})"
            yield Alarm(
                "version-not-adopted",
                f"{name} still generates with version {course.version:g}, {behind} (alarms.adopted_within)",
                name,
            )

    def _follow(self, name: str, lease: Lease, newest: float | None, now: float) -> _Course:
        far, version = how_far(lease), lease.progress.get("version")
        course = self.courses.get(name)
        if course is None or course.life != lease.life:
            course = self.courses[name] = _Course(lease.life, far, now, version)
        if far > course.far:
            course.steps.append(now - course.since)
            course.far, course.since = far, now
        is_behind = name != "trainer" and version is not None and newest is not None and version < newest
        if not is_behind or version != course.version:
            course.behind_since = None
        if is_behind and course.behind_since is None:
            course.behind_since = now
        course.version = version
        return course

    def _newest_version(self, seen: Mapping[str, Seen]) -> float | None:
        """Return the newest version that searchers could use: the newest that the trainer has published, minus the lag.
        Return None if the trainer's lease names no version."""
        version = seen["trainer"].lease.progress.get("version") if "trainer" in seen else None
        return None if version is None else version - self.lag

    def _disks(self, seen: Mapping[str, Seen]) -> list[Alarm]:
        """Return one alarm for each machine whose disk is filling, however many roles report it."""
        alarms = {
            lease.host: Alarm(
                "disk-filling",
                f"{lease.disk_gb:.2f} GB are free on the disk of {lease.disk} on {lease.host}, less than "
                f"{self.config.disk_gb:g} GB (alarms.disk_gb)",
                lease.host,
                "error",
            )
            for lease, _ in seen.values()
            if lease.disk_gb is not None and lease.disk_gb < self.config.disk_gb
        }
        return list(alarms.values())


def how_far(lease: Lease) -> float:
    """Return how much work a role has done over all its lives: its gradient steps, stored shards or scored versions."""
    return max((lease.progress.get(name, 0.0) for name in ("step", "shards", "scored")), default=0.0)


def lease_alarms(watch: LeaseWatch) -> Iterator[Alarm]:
    """Yield an alarm for each lease that was unreadable when `watch` last read the leases."""
    for role, damage in watch.damaged.items():
        message = f"{damage}: {role} writes it again if it is alive; otherwise its next life replaces it"
        yield Alarm(DAMAGED, message, role)
