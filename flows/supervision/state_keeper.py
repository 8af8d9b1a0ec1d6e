"""Keeps the wanted state of a run for its supervisor: a damaged one is restored. Tells of damaged leases, too."""

from collections.abc import Callable, Iterator

from storage.runs.control import State, change_state, keep_state, restore_state
from storage.runs.lease_watch import LeaseWatch
from storage.runs.leases import DAMAGED
from storage.runs.run import Run
from tba.alarms import Alarm
from tba.errors import Damaged


class WantedState:
    """Reads the wanted state of a run for a supervisor. If the record is damaged or gone, this class stores
    again the state that it read last, and says so by `tell(kind, message, severity)`."""

    def __init__(self, run: Run, tell: Callable[[str, str, str], None]):
        self.run, self.tell = run, tell
        self.last: State | None = None

    def read(self) -> State:
        """Return the wanted state. Damaged only if the record could not be read before either."""
        try:
            self.last = keep_state(self.run, self.last)
        except Damaged as damage:
            if self.last is None:
                raise
            self.last = restore_state(self.run, self.last)
            self.tell("state-damaged", f"{damage}: restored, {_say(self.last)}", "warning")
        return self.last or State()

    def change(self, **changes: object) -> State:
        self.read()
        self.last = change_state(self.run, **changes)
        return self.last


def _say(state: State) -> str:
    wanted = f"desired={state.desired!r} and searchers={state.searchers}"
    return f"as it was read last, with {wanted}; whoever wanted something else meanwhile asks again"


def lease_alarms(watch: LeaseWatch) -> Iterator[Alarm]:
    """One alarm for each lease that could not be read at the last look of a watch."""
    for role, damage in watch.damaged.items():
        message = f"{damage}: unless {role} lives and writes it again, its next life replaces it"
        yield Alarm(DAMAGED, message, role)
