"""What a supervisor knows of a life of a role, whoever has launched it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

from flows.supervision.processes import FAILED, FINISHED, STOPPED, Role
from storage.runs.lease_watch import Seen
from tba.config import LimitsConfig

FAILED_WHY = "failed: "  # how the state of a run that has failed begins to say why it is to stop
ENDINGS = {"run-finished"}  # told to everybody though they are good news
CLOSED = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
"""Last words of a lease: its role has ended and said so. With the exit code that goes with each."""


class Life(Protocol):
    """One life of a role, started by a launcher."""

    role: Role
    number: int

    @property
    def where(self) -> str: ...

    @property
    def waits_for(self) -> str:
        """What it needs before it can begin; empty if nothing is known to be lacking."""
        ...

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def let_go(self) -> None:
        """Leave it running."""
        ...

    def last_words(self) -> str: ...


class Launcher(Protocol):
    """How roles come to life: as processes of this host, or through deployments on others."""

    start_deadline: float
    """Seconds within which a life must take its lease."""
    end_grace: float
    """Seconds between `terminate` and `kill`, and after `kill` until a life is given up for lost."""
    last_word_after: float
    """Seconds after which the last word of a lease is the end of its life, though nobody else has said so."""

    def start(self, role: Role, number: int) -> Life:
        """NotNow, saying why, if it cannot be had at the moment."""
        ...

    def ended(self, life: Any) -> None:
        """Tidy up after a life this launcher started."""
        ...

    def close(self) -> None:
        """Tidy up after all of them."""
        ...


class Event(NamedTuple):
    kind: str
    message: str
    severity: str = "info"
    data: Mapping[str, Any] = {}

    @property
    def is_more_than_news(self) -> bool:
        """Whether to tell somebody who is not looking."""
        return self.severity != "info" or "alarm" in self.data or self.kind in ENDINGS


class StopRequest(NamedTuple):
    why: str
    within: float | None = None  # seconds until somebody will end this process; None waits as long as roles need


def hangs(seen: Seen | None, life_before: int, up: float, limits: LimitsConfig, launcher: Launcher) -> str:
    """What is wrong with a life that runs: its lease or its work stands still, or it never took a lease. Empty if
    nothing is."""
    if not has_begun(seen, life_before):
        return f"has taken no lease for {up:.0f} s" if up > launcher.start_deadline else ""
    # One that has said its last word may take a while to leave.
    patience = limits.stop_grace if seen.lease.status in CLOSED else limits.silent_after
    if seen.silent_for > patience:
        return say_silent(seen)
    if seen.lease.quiet > limits.data_deadline:
        return f"has stood still for {seen.lease.quiet:.0f} s (pid {seen.lease.pid} on {seen.lease.host})"
    return ""


def has_begun(seen: Seen | None, life_before: int) -> TypeGuard[Seen]:
    """Whether a life has taken the lease."""
    return seen is not None and seen.lease.life > life_before


def say_silent(seen: Seen) -> str:
    lease = seen.lease
    return f"has been silent for {seen.silent_for:.0f} s (pid {lease.pid} on {lease.host}, last said {lease.status!r})"
