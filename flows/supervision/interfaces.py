"""The interfaces of a life of a role and of a launcher, and the events that a supervisor reports."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from flows.supervision.processes import FAILED, FINISHED, STOPPED, Role

FAILED_WHY = "failed: "  # beginning of the reason in the wanted state of a run that has failed
ENDINGS = {"run-finished"}  # kinds of events that people are notified of although nothing is wrong
CLOSED = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
"""The lease statuses of a role that has ended, each with the exit code that it stands for."""


class Life(Protocol):
    """One life of a role, started by a launcher."""

    role: Role
    number: int

    @property
    def where(self) -> str: ...

    @property
    def waits_for(self) -> str:
        """Return what the life is waiting for before it can begin; empty if it is not known to wait."""
        ...

    def poll(self) -> int | None:
        """Return the exit code, or None while the life has not ended."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def let_go(self) -> None:
        """Stop watching the life and leave it running."""
        ...

    def last_words(self) -> str:
        """Return the last lines of the life's log."""
        ...


class Launcher(Protocol):
    """Starts roles: as processes of this host, or through deployments on other machines."""

    start_deadline: float
    """Seconds within which a life must take its lease."""
    end_grace: float
    """Seconds from `terminate` to `kill`, and from the first `kill` until a life that has not ended counts as lost."""
    last_word_after: float
    """A lease that was closed this many seconds ago proves that its life has ended, even if there is no exit code."""

    def start(self, role: Role, number: int) -> Life:
        """Start a life of the role. Raise NotNow, with the reason, if this is not possible at the moment."""
        ...

    def ended(self, life: Any) -> None:
        """Clean up after a life that this launcher has started."""
        ...

    def close(self) -> None:
        """Clean up after all lives."""
        ...


class Event(NamedTuple):
    kind: str
    message: str
    severity: str = "info"
    data: Mapping[str, Any] = {}

    @property
    def is_more_than_news(self) -> bool:
        """True if people who are not watching the run are to be notified."""
        return self.severity != "info" or "alarm" in self.data or self.kind in ENDINGS


class StopRequest(NamedTuple):
    why: str
    within: float | None = None  # seconds until this process is killed; None: the stop may take as long as roles need
