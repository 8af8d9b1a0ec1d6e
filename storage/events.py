"""Starts, stops, adoptions, refusals and failures of every role: one small record each."""

import json
import logging
import threading
from typing import Any

from storage import layout, records
from storage.run import Run
from tba.errors import AlreadyExists, StorageError

log = logging.getLogger(__name__)

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Events:
    """The `EventLog` of one life of a role. Trouble with the store is logged, never raised: an event is not worth
    a run."""

    def __init__(self, run: Run, role: str, life: int):
        self.run = run
        self.role = role
        self.life = life
        self._seq = 0
        self._lock = threading.Lock()

    def write(self, kind: str, message: str, *, severity: str = "info", **data: Any) -> None:
        log.log(_LEVELS.get(severity, logging.INFO), "%s: %s", kind, message)
        with self._lock:
            event = {
                "at": records.now(),
                "role": self.role,
                "life": self.life,
                "seq": self._seq,
                "kind": kind,
                "severity": severity,
                "message": message,
                "data": json.loads(json.dumps(data, default=str)),
            }
            self._seq += 1
        try:
            self._store(event)
        except StorageError as error:
            log.warning("event %s was not stored: %s", kind, error)

    def _store(self, event: dict[str, Any]) -> None:
        """Under the next free number: another object of the same role and life may write events too."""
        while True:
            try:
                self.run.store.create(layout.event(self.role, self.life, event["seq"]), records.encode(event))
            except AlreadyExists:
                with self._lock:
                    event["seq"] = self._seq
                    self._seq += 1
                continue
            return


def read_events(run: Run) -> list[dict[str, Any]]:
    """Every event of every role, in the order in which they say they happened."""
    events = records.read_all(run.store, layout.EVENTS, "at", "role", "kind", "severity", "message")
    return sorted(events, key=lambda event: (event["at"], event["role"]))
