"""Decides whether a running role hangs: whether it has been silent, or idle, for too long."""

from typing import TypeGuard

from flows.supervision.interfaces import CLOSED, Launcher
from storage.runs.lease_watch import Seen
from tba.config import LimitsConfig


def hangs(seen: Seen | None, life_before: int, up: float, limits: LimitsConfig, launcher: Launcher) -> str:
    """Return why a running life counts as hanging: it has taken no lease in time, does not renew its lease, or does no
    work. Return an empty string if it does not hang."""
    if not has_begun(seen, life_before):
        return f"has taken no lease for {up:.0f} s" if up > launcher.start_deadline else ""
    # A life that has closed its lease does not renew it, and may need a while until its process ends.
    patience = limits.stop_grace if seen.lease.status in CLOSED else limits.silent_after
    if seen.silent_for > patience:
        return say_silent(seen)
    if seen.lease.quiet > limits.data_deadline:
        return f"has done no work for {seen.lease.quiet:.0f} s (pid {seen.lease.pid} on {seen.lease.host})"
    return ""


def has_begun(seen: Seen | None, life_before: int) -> TypeGuard[Seen]:
    """Return True if the lease is that of a life after `life_before`, so that the started life has taken the lease."""
    return seen is not None and seen.lease.life > life_before


def say_silent(seen: Seen) -> str:
    lease = seen.lease
    return (
        f"has not renewed its lease for {seen.silent_for:.0f} s (pid {lease.pid} on {lease.host}, last status "
        f"{lease.status!r})"
    )
