"""Starts, stops, adoptions, refusals and failures of every role: one small record each.

Each event names the event that its writer stored before it, so an event that was lost or replaced is found.
"""

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from typing import Any

from storage import layout
from storage.objects import records
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, Missing, StorageError

log = logging.getLogger(__name__)

ROUTINE = {"version-adopted"}  # kinds of which there are many and none is news

_FIELDS = ("at", "role", "kind", "severity", "message")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Events:
    """The `EventLog` of one life of a role. Trouble with the store is logged, never raised: an event is not worth
    a run. Who tells of routine does not wait for the store. The events themselves are logged, too, unless whoever
    writes them tells them in another way."""

    def __init__(self, run: Run, role: str, life: int, *, logs: bool = True):
        self.run = run
        self.role = role
        self.life = life
        self.logs = logs
        self._seq = 0
        self._lock = threading.Lock()
        self._storing = threading.Lock()  # of the chain: events are stored one after the other
        self._newest: dict[str, Any] | None = None  # names the event that was stored last
        self._routine = ThreadPoolExecutor(1, "events")  # a process that ends waits for what was submitted

    def write(self, kind: str, message: str, *, severity: str = "info", **data: Any) -> None:
        if self.logs:
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
                "data": _plain(data),
            }
            self._seq += 1
        if kind in ROUTINE:
            self._routine.submit(self._store, event)
        else:
            self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        try:
            self._create(event)
        except StorageError as error:
            log.warning("event %s was not stored: %s", event["kind"], error)

    def _create(self, event: dict[str, Any]) -> None:
        """Store an event under the next free number: another object of the same role and life may write events too."""
        with self._storing:
            while True:
                data = records.encode({**event, "previous": self._newest})
                try:
                    self.run.store.create(layout.event(self.role, self.life, event["seq"]), data)
                except AlreadyExists:
                    with self._lock:
                        event["seq"] = self._seq
                        self._seq += 1
                    continue
                self._newest = {"seq": event["seq"], "sha256": sha256(data).hexdigest()}
                return


def _plain(data: dict[str, Any]) -> Any:
    """As JSON knows it, whatever it is."""
    try:
        return json.loads(json.dumps(data, default=str))
    except (TypeError, ValueError):  # keys that are no names, or a circle
        return {name: str(value) for name, value in data.items()}


class EventReader:
    """Reads each event once."""

    def __init__(self, run: Run):
        self.run = run
        self._known: set[str] = set()

    def new(self) -> list[dict[str, Any]]:
        """What has come since the last time, in the order in which it says it happened."""
        keys = [entry.key for entry in self.run.store.list(layout.EVENTS) if layout.is_part(entry.key)]
        keys = [key for key in keys if key not in self._known]
        events = [event for key, data in self._read(keys) if (event := self._decoded(key, data))]
        return sorted(events, key=lambda event: (event["at"], event["role"]))

    def _read(self, keys: list[str]) -> Iterator[tuple[str, bytes]]:
        """One that is listed and cannot be found keeps nobody from the others."""
        try:
            found = self.run.store.read_many(keys)
        except Missing:
            for key in keys:
                with suppress(Missing):
                    yield key, self.run.store.read(key)
        else:
            yield from zip(keys, found, strict=True)

    def _decoded(self, key: str, data: bytes) -> dict[str, Any] | None:
        """None, and a word about it once, for one that is damaged."""
        self._known.add(key)
        name = f"{self.run.url}/{key}"
        try:
            event = records.decode(data, name, *_FIELDS)
            with records.reading(name):
                for field in _FIELDS:
                    records.check_kind(field, event[field], str)
        except Damaged as error:
            log.warning("an event is passed over: %s", error)
            return None
        return event


def read_events(run: Run) -> list[dict[str, Any]]:
    """Every event of every role."""
    return EventReader(run).new()
