"""Alarms: problems that raise no error. Each alarm is reported once when it begins, and once when it is over."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

BEGAN, OVER = "began", "over"  # values of `alarm` in the data of an alarm's event


class Alarm(NamedTuple):
    kind: str
    message: str
    of: str = ""  # what the alarm is about, if there can be several alarms of one kind
    severity: str = "warning"


class Alarms:
    """The alarms of one role. The role reports them with `tell(kind, message, severity, **data)`. An alarm is over once
    it was absent from `patience` looks in a row."""

    def __init__(self, tell: Callable[..., None], *, patience: int = 1):
        self.tell, self.patience = tell, patience
        self.held: dict[tuple[str, str], _Held] = {}

    def update(self, found: Iterable[Alarm]) -> None:
        """Report each alarm in `found` that is new, and each earlier alarm that is over. `found` must have all alarms
        that hold at this moment."""
        present = {(alarm.kind, alarm.of): alarm for alarm in found}
        for key, alarm in present.items():
            if key not in self.held:
                self.held[key] = _Held(alarm.message)
                self._tell(alarm, alarm.message, alarm.severity, BEGAN)
            self.held[key].absent = 0
        for key in self.held.keys() - present.keys():
            held = self.held[key]
            held.absent += 1
            if held.absent >= self.patience:
                del self.held[key]
                message = f"over after {time.monotonic() - held.since:.0f} s: {held.message}"
                self._tell(Alarm(key[0], message, key[1]), message, "info", OVER)

    def _tell(self, alarm: Alarm, message: str, severity: str, word: str) -> None:
        data: dict[str, Any] = {"alarm": word} | ({"of": alarm.of} if alarm.of else {})
        self.tell(alarm.kind, message, severity=severity, **data)


class _Held:
    def __init__(self, message: str):
        self.message, self.since, self.absent = message, time.monotonic(), 0
