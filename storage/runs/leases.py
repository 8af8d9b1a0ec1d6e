"""Leases: a role shows by its lease that it is alive.

A lease is one object per role, which the role renews in the background by compare-and-swap. Each life of a role has a
higher number than the life before, so an older life notices at its next renewal that it has been superseded. Nobody
compares the clocks of two machines: a watcher measures on its own monotonic clock for how long the counter of a lease
has not changed.
"""

import math
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from storage import layout
from storage.objects import records
from storage.objects.damage import LookingAt
from storage.runs import lives
from storage.runs.run import Run
from tba.errors import Damaged

SUPERVISOR = "supervisor"
DAMAGED = "lease-damaged"
"""The kind of the event, and of the alarm, for a lease that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    role: str
    life: int
    host: str
    pid: int
    counter: int
    status: str
    progress: dict[str, float] = field(default_factory=dict)
    renewed_at: str
    supervised: bool  # whether the role stops by itself when it has no supervisor
    quiet: float = 0.0  # seconds since the role's own work, not only the renewing thread, gave a sign of life
    hears_every: float = 0.0  # longest recent time between two checks whether to stop, in seconds
    disk_gb: float | None = None  # free space on the fullest disk that the role writes to
    disk: str = ""  # a folder on that disk


def read_lease(run: Run, role: str) -> Lease | None:
    """Return the lease of a role; None if no life of the role ever held one. Raise Damaged, naming the object, if the
    lease cannot be read."""
    found = run.store.read_tagged(layout.lease(role))
    return decode_lease(run, layout.lease(role), found[0]) if found else None


def readable_lease(run: Run, role: str) -> Lease | None:
    """Return the lease of a role; None if no life of the role ever held one, or if the lease is damaged."""
    try:
        return read_lease(run, role)
    except Damaged:
        return None


class Leases(NamedTuple):
    leases: list[Lease]  # sorted by role
    damaged: dict[str, str]  # by role: what is wrong with a lease that cannot be read


def read_leases(run: Run, looking_at: LookingAt | None = None) -> list[Lease]:
    """Return all readable leases, sorted by role. For each unreadable lease, raise Damaged inside the context
    `looking_at(key)`, which may record the error instead of passing it on. Without `looking_at`, unreadable leases are
    skipped silently."""
    found = read_roles(run)
    if looking_at:
        for role, problem in found.damaged.items():
            with looking_at(layout.lease(role)):
                raise Damaged(problem)
    return found.leases


def read_roles(run: Run) -> Leases:
    """Return the leases that can be read, and by role what is wrong with each of the others."""
    found = Leases([], {})
    keys = {entry.key: role for entry in run.store.list(layout.ROLES) if (role := layout.parse_lease(entry.key))}
    for (key, role), data in zip(keys.items(), run.store.read_many(list(keys)), strict=True):
        try:
            found.leases.append(decode_lease(run, key, data))
        except Damaged as damage:
            found.damaged[role] = str(damage)
    return found


def decode_lease(run: Run, key: str, data: bytes) -> Lease:
    """Return the lease in `data`. Raise Damaged, naming the object and the fault, unless `data` is a lease of the role
    that `key` names."""
    required = ("role", "life", "host", "pid", "counter", "status", "renewed_at", "supervised")
    record = records.decode(data, f"{run.url}/{key}", *required)
    try:
        lease = records.known(Lease, {**record, "progress": _numbers(record.get("progress", {}))})
        _check(lease, layout.parse_lease(key))
    except (OverflowError, TypeError, ValueError) as error:
        raise Damaged(f"{run.url}/{key} is not a lease: {error}") from None
    return lease


def _check(lease: Lease, role: str | None) -> None:
    """Raise ValueError unless the lease belongs to this role and all its values are possible."""
    if lease.role != role:
        raise ValueError(f"role must be {role!r}, got {lease.role!r}")
    if not 0 < lease.life < lives.MOST_LIVES:
        raise ValueError(f"life must be a number between 0 and {lives.MOST_LIVES}, got {lease.life}")
    disk_gb = 0.0 if lease.disk_gb is None else lease.disk_gb
    for name, value in {**vars(lease), "disk_gb": disk_gb}.items():
        if name in ("counter", "pid", "quiet", "hears_every", "disk_gb") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number from 0, got {value!r}")
    if datetime.fromisoformat(lease.renewed_at).tzinfo is None:
        raise ValueError(f"renewed_at has no time zone: {lease.renewed_at!r}")


def _numbers(progress: Any) -> dict[str, float]:
    """Return the progress that a lease reports. Leave out null entries, which stand for numbers that were not
    finite."""
    if not isinstance(progress, dict):
        raise TypeError(f"progress must be an object, got a {type(progress).__name__}")
    for name, value in progress.items():
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"progress must have finite numbers, got {name}={value!r}")
    return {name: value for name, value in progress.items() if value is not None}


def encode_lease(lease: Lease) -> bytes:
    return records.encode(asdict(lease))
