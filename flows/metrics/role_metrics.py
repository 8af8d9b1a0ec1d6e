"""Metrics of the roles of a run, from their leases."""

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from flows.metrics.catalogue import MOST_SEARCHERS, STEP, Values
from flows.supervision.interfaces import CLOSED
from storage.runs.leases import Lease

ALIVE, SILENT = "alive", "silent"
STATES = (ALIVE, SILENT, *sorted(CLOSED))
_SEARCHER = "searcher"
_EXPECTED = ("trainer", _SEARCHER, "evaluator")  # kinds that are counted even if none has a lease


def set_roles(values: Values, leases: Sequence[Lease], living: Collection[str]) -> None:
    """Set the metrics of roles. `living` names those that are alive."""
    counts: Counter[tuple[str, str]] = Counter()
    now, searchers = datetime.now(UTC), 0
    for lease in leases:
        role, index = split(lease)
        state = lease.status if lease.status in CLOSED else ALIVE if lease.role in living else SILENT
        counts[role, state] += 1
        searchers += role == _SEARCHER
        if role == _SEARCHER and searchers > MOST_SEARCHERS:
            continue
        values.set("tba_role_up", state == ALIVE, role, index)
        values.set("tba_role_life", lease.life, role, index)
        if state not in CLOSED:
            _set_present(values, lease, role, index, now)
        if role == _SEARCHER:
            _set_searcher(values, lease, index)
    for role in {*_EXPECTED, *(role for role, _ in counts)}:
        for state in STATES:
            values.set("tba_roles", counts[role, state], role, state)


def set_newest_step(values: Values, stored: dict[str, float], leases: Sequence[Lease]) -> None:
    """Set the metrics of the newest step: `stored` has those of the ledger. The lease of the trainer tells of later
    steps, because the ledger grows only at syncs."""
    told = next((lease.progress for lease in leases if lease.role == "trainer"), {})
    newest = {**stored, **told} if told.get("step", -1) >= stored.get("step", 0) else stored
    for name, metric in STEP.items():
        values.set(metric, newest.get(name))
    values.set("tba_run_step", newest.get("step", 0))


def stored_shards(leases: Sequence[Lease]) -> dict[int, int]:
    """Return, for each searcher whose lease says it, how many shards the searcher has stored in all its lives."""
    told = [(split(lease), lease.progress.get("shards")) for lease in leases]
    return {int(index): int(shards) for (role, index), shards in told if role == _SEARCHER and shards is not None}


def split(lease: Lease) -> tuple[str, str]:
    """Return the kind of a role and its index."""
    kind, _, number = lease.role.partition("-")
    return (kind, str(int(number))) if number.isdecimal() else (lease.role, "0")


def _set_present(values: Values, lease: Lease, role: str, index: str, now: datetime) -> None:
    """Set what is true only as long as the role has not ended."""
    age = (now - datetime.fromisoformat(lease.renewed_at)).total_seconds()
    values.set("tba_role_lease_age_seconds", max(0.0, age), role, index)
    values.set("tba_role_quiet_seconds", lease.quiet, role, index)
    if role == _SEARCHER:
        values.set("tba_searcher_version", lease.progress.get("version"), index)
    values.set("tba_role_free_disk_bytes", None if lease.disk_gb is None else 1e9 * lease.disk_gb, role, index)


def _set_searcher(values: Values, lease: Lease, index: str) -> None:
    progress = lease.progress
    for name in ("tokens", "trajectories", "shards"):
        values.set(f"tba_searcher_{name}_total", progress.get(name), index)
    for name, seconds in progress.items():
        if name.startswith("seconds_"):
            values.set("tba_searcher_seconds_total", seconds, index, name.removeprefix("seconds_"))
