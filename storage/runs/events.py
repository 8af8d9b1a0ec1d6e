"""Events: small records of what a role does and meets, such as starts, stops, adopted versions, refused shards and
failures.

Each event names the event that its writer stored before it. So a check finds an event that was lost or replaced.
"""

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from typing import Any

from storage import layout
from storage.objects import records
from storage.objects.store import Entry
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, Missing, StorageError

log = logging.getLogger(__name__)

ROUTINE = {"version-adopted"}  # kinds of events that are frequent and never news

LATE = 100
"""How many newer events of its role may be stored before an event and the event is still read."""

LISTED_AT_ONCE = 1000
"""Events that one request to S3 lists."""

_AT_ONCE = 64  # events that are read at the same time

_FIELDS = ("at", "role", "kind", "severity", "message")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Events:
    """The events of one life of a role; see `EventLog` in tba/interfaces.py. Errors of the store are logged and never
    raised, because it is better to lose an event than to end the role. A routine event is stored in the background: its
    writer does not wait. Each event also goes to the process's log, unless `logs` is False because the caller reports
    its events in another way."""

    def __init__(self, run: Run, role: str, life: int, *, logs: bool = True):
        self.run = run
        self.role = role
        self.life = life
        self.logs = logs
        self._seq = 0
        self._lock = threading.Lock()
        self._storing = threading.Lock()  # held while an event is stored: each event names the one before it
        self._newest: dict[str, Any] | None = None  # seq and digest of the event that was stored last
        self._routine = ThreadPoolExecutor(1, "events")  # before the process ends, it waits for submitted events

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
        """Store an event under the next free number. Another `Events` object may write for the same role and life."""
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
    """Return the data in a form that JSON can store. A value that JSON cannot express becomes its text."""
    try:
        return json.loads(json.dumps(data, default=str))
    except (TypeError, ValueError):  # keys that are not strings, or a cycle
        return {name: str(value) for name, value in data.items()}


class EventReader:
    """Reads the events of a run, each of them once. Damaged events are logged and skipped.

    A look lists all events together, or what is new of each role, whichever takes fewer requests. So its cost is
    bounded by the number of roles, however many events are stored. An event is missed only if its role has stored more
    than `LATE` other events in the meantime."""

    def __init__(self, run: Run):
        self.run = run
        self._by_role: defaultdict[str, _SeenEvents] = defaultdict(_SeenEvents)
        self._pending: list[dict[str, Any]] = []  # events that were read before the store failed

    def new(self) -> list[dict[str, Any]]:
        """Return the events that have arrived since the last call, sorted by the times that they state. A call that
        fails loses none: the next call returns what it has read."""
        for events in self.batches():
            self._pending += events
        found, self._pending = self._pending, []
        return sorted(found, key=lambda event: (event["at"], event["role"]))

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the events that have arrived since the last call, a few at a time, those of one role in their order. An
        event that was yielded is not yielded again, even if the store fails later."""
        keys = [entry.key for entry in self._listed() if layout.is_part(entry.key)]
        keys = sorted(key for key in keys if not self._by_role[_role_of(key)].has(key))
        for start in range(0, len(keys), _AT_ONCE):
            found = list(self._read(keys[start : start + _AT_ONCE]))
            yield [event for key, data in found if (event := self._decoded(key, data))]
        for seen in self._by_role.values():
            seen.forget()

    def _listed(self) -> Iterator[Entry]:
        stored = sum(seen.count for seen in self._by_role.values())
        if stored <= LISTED_AT_ONCE * (1 + len(self._by_role)):
            yield from self.run.store.list(layout.EVENTS)
            return
        for role in self.run.store.folders(layout.EVENTS):
            yield from self.run.store.list(f"{layout.EVENTS}{role}/", after=self._by_role[role].after)

    def _read(self, keys: list[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the key and the bytes of each event. An event that is listed but does not exist is skipped."""
        try:
            found = self.run.store.read_many(keys)
        except Missing:
            for key in keys:
                with suppress(Missing):
                    yield key, self.run.store.read(key)
        else:
            yield from zip(keys, found, strict=True)

    def _decoded(self, key: str, data: bytes) -> dict[str, Any] | None:
        """Return the event; None if it is damaged. Damage is logged."""
        self._by_role[_role_of(key)].add(key)
        name = f"{self.run.url}/{key}"
        try:
            event = records.decode(data, name, *_FIELDS)
            with records.reading(name):
                for field in _FIELDS:
                    records.check_kind(field, event[field], str)
        except Damaged as error:
            log.warning("an event is skipped: %s", error)
            return None
        return event


class _SeenEvents:
    """The events of one role that were read. Only the keys of the newest are kept."""

    def __init__(self) -> None:
        self.count = 0
        self.after = ""  # this key and all smaller ones count as read
        self._newest: set[str] = set()

    def has(self, key: str) -> bool:
        return key <= self.after or key in self._newest

    def add(self, key: str) -> None:
        self.count += 1
        self._newest.add(key)

    def forget(self) -> None:
        """Drop all keys but the newest `LATE`."""
        if len(self._newest) > LATE:
            keys = sorted(self._newest)
            self.after, self._newest = keys[-LATE - 1], set(keys[-LATE:])


def _role_of(key: str) -> str:
    return key.removeprefix(layout.EVENTS).partition("/")[0]


def read_events(run: Run) -> list[dict[str, Any]]:
    """Return all readable events of all roles, sorted by time."""
    return EventReader(run).new()
