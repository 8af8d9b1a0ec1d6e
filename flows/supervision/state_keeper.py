"""Read the wanted state of a run for its supervisor, and restore it if it is damaged. Report damaged leases, too."""

from collections.abc import Callable, Iterator

from storage.runs.control import State, change_state, keep_state, restore_state
from storage.runs.lease_watch import LeaseWatch
from storage.runs.leases import DAMAGED
from storage.runs.run import Run
from tba.alarms import Alarm
from tba.errors import Damaged


class WantedState:
    """Reads and changes the wanted state of a run for a supervisor. If the record is damaged or gone, this class stores
    the state that it read last again. It reports a restored damaged state by `tell(kind, message, severity)`."""

    def __init__(self, run: Run, tell: Callable[[str, str, str], None]):
        self.run, self.tell = run, tell
        self.last: State | None = None

    def read(self) -> State:
        """Return the wanted state. Raise Damaged if the record is damaged and has never been read before."""
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
    return f"as it was read last, with {wanted}; if you have changed it since then, change it again"


def lease_alarms(watch: LeaseWatch) -> Iterator[Alarm]:
    """Yield an alarm for each lease that could not be read when the watch read the leases last."""
    for role, damage in watch.damaged.items():
        message = f"{damage}: {role} writes it again if it is alive; otherwise its next life replaces it"
        yield Alarm(DAMAGED, message, role)
