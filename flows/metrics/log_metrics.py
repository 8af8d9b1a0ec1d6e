"""Metrics from the log of a run. Each reader reads every object once, and each time asks only for what is new."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from flows.metrics.catalogue import Values
from storage import layout
from storage.log.sync_records import SyncRecord
from storage.log.sync_records import decode as decode_sync
from storage.objects import records
from storage.objects.damage import DamageLog
from storage.queries.tables import decode_steps
from storage.runs.attempts import read_attempt
from storage.runs.events import EventReader
from storage.runs.run import Run
from storage.weights.evaluations import read_scores
from tba.alarms import BEGAN, OVER
from tba.types import Score, Version

_AT_ONCE = 64  # objects that are read at the same time
_BEHIND = 3  # newest objects of the ledger that are listed again, because the listing of a store may be behind
EVENTS_EVERY, SIZES_EVERY = 30.0, 60.0  # seconds between two looks for what takes several listings


class SyncMetrics:
    """Counts what sync records have admitted and refused."""

    def __init__(self, run: Run, damage: DamageLog):
        self.run, self.damage = run, damage
        self.next = 0  # the number of the first record that was not read
        self.newest: SyncRecord | None = None
        self._counts: Counter[str] = Counter()
        self._named: defaultdict[int, int] = defaultdict(int)  # by searcher: 1 more than the newest seq of a record

    def read(self) -> None:
        after = layout.sync(self.next - 1) if self.next else ""
        numbers = [layout.parse_sync(entry.key) for entry in self.run.store.list(layout.SYNCS, after=after)]
        end = 1 + max((number for number in numbers if number is not None), default=self.next - 1)
        for key, data in _read(self.run, [layout.sync(number) for number in range(self.next, end)], self.damage):
            self.next = 1 + (layout.parse_sync(key) or 0)  # at once: the store may fail at the next record
            with self.damage.looking_at(key):
                self._add(decode_sync(data, key))
        self.next = end

    def _add(self, record: SyncRecord) -> None:
        self.newest = record
        self._counts["tba_syncs_total"] += 1
        self._counts["tba_admitted_shards_total"] += len(record.shards)
        self._counts["tba_admitted_trajectories_total"] += record.rows
        self._counts["tba_admitted_bytes_total"] += sum(shard.bytes for shard in record.shards)
        self._counts["tba_refused_shards_total"] += len(record.refused)
        for named in (*record.shards, *record.refused):
            if name := layout.parse_shard(named.key):
                self._named[name[0]] = max(self._named[name[0]], name[1] + 1)

    def set(self, values: Values, stored_shards: Mapping[int, int]) -> None:
        """Set the metrics. `stored_shards` has, by searcher, how many shards it has stored."""
        for name in (
            "tba_syncs_total", "tba_admitted_shards_total", "tba_admitted_trajectories_total",
            "tba_admitted_bytes_total", "tba_refused_shards_total",
        ):  # fmt: skip
            values.set(name, self._counts[name])
        waiting = (stored - self._named.get(searcher, 0) for searcher, stored in stored_shards.items())
        values.set("tba_waiting_shards", sum(max(0, shards) for shards in waiting))
        if self.newest:
            with self.damage.looking_at(layout.sync(self.newest.sync)):
                created_at = datetime.fromisoformat(self.newest.created_at)
                values.set("tba_sync_timestamp_seconds", created_at.timestamp())


class StepMetrics:
    """Adds up the gradient steps in the ledger, those of all attempts."""

    def __init__(self, run: Run, damage: DamageLog):
        self.run, self.damage = run, damage
        self.newest: dict[str, float] = {}  # the metrics of the newest step, without those that it did not measure
        self.attempts = 0
        self._order = (0, 0)  # attempt and number of the newest step
        self._known: set[str] = set()
        self._after = ""
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)

    def read(self) -> None:
        self._read_attempts()
        keys = [entry.key for entry in self.run.store.list(layout.STEPS, after=self._after)]
        new = [key for key in keys if key not in self._known and layout.parse_ledger(key)]
        for key, data in _read(self.run, new, self.damage):
            with self.damage.looking_at(key):
                self._known.add(key)
                for row in decode_steps(data, key).to_pylist():
                    self._add({name: value for name, value in row.items() if value is not None})
        self._known.update(new)
        own = sorted(key for key in keys if (name := layout.parse_ledger(key)) and name.attempt == self.attempts)
        if len(own) > _BEHIND:
            self._after = own[-_BEHIND - 1]

    def _read_attempts(self) -> None:
        """Look for new attempts. The ledger of an attempt begins after the sync that the attempt continues, so the next
        listing has to begin there."""
        after = layout.attempt(self.attempts) if self.attempts else ""
        for entry in self.run.store.list(layout.ATTEMPTS, after=after):
            if number := layout.parse_attempt(entry.key):
                begins = ""
                with self.damage.looking_at(entry.key):
                    if origin := read_attempt(self.run, number).continues:
                        begins = layout.steps(origin.number, number)
                self._after = min(self._after, begins)
                self.attempts = number

    def _add(self, row: Mapping[str, float]) -> None:
        if (order := (int(row["attempt"]), int(row["step"]))) > self._order:
            self._order, self.newest = order, dict(row)
        self._counts["tba_trainer_steps_total"] += 1
        self._counts["tba_trainer_tokens_total"] += row.get("tokens", 0.0)
        self._counts["tba_trainer_skipped_steps_total"] += row.get("skipped", 0.0)
        self._counts["tba_trainer_step_seconds_total"] += row.get("seconds_step", 0.0)
        for name, value in row.items():
            if name.startswith("seconds_") and name != "seconds_step":
                self._parts[name.removeprefix("seconds_")] += value

    def set(self, values: Values) -> None:
        for name in (
            "tba_trainer_steps_total", "tba_trainer_tokens_total", "tba_trainer_skipped_steps_total",
            "tba_trainer_step_seconds_total",
        ):  # fmt: skip
            values.set(name, self._counts[name])
        values.set_all("tba_trainer_part_seconds_total", {(part,): value for part, value in self._parts.items()})
        values.set("tba_run_attempts", self.attempts)


class ScoreMetrics:
    """The scores of the newest version that has any."""

    def __init__(self, run: Run, damage: DamageLog):
        self.run, self.damage = run, damage
        self._known: set[str] = set()
        self._newest: list[Score] = []
        self._seconds = 0.0

    def read(self) -> None:
        keys = [entry.key for entry in self.run.store.list(layout.EVALUATIONS) if layout.parse_evaluation(entry.key)]
        new = [key for key in keys if key not in self._known]
        for key, data in _read(self.run, new, self.damage):
            with self.damage.looking_at(key):
                self._known.add(key)
                scores = read_scores(data, key)
                self._seconds += sum(score.seconds for score in scores)
                if scores and (not self._newest or scores[0].version.order > self._newest[0].version.order):
                    self._newest = scores
        self._known.update(new)

    def set(self, values: Values) -> None:
        values.set("tba_evaluations_total", len(self._known))
        values.set("tba_evaluation_seconds_total", self._seconds)
        if self._newest:
            values.set("tba_evaluation_version", self._newest[0].version.number)
        values.set_all("tba_evaluation_score", {(score.metric,): score.value for score in self._newest})


class EventMetrics:
    """Counts events, and keeps which alarms hold."""

    def __init__(self, run: Run):
        self._reader = EventReader(run)
        self._next_look = 0.0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lives: dict[str, int] = {}  # by role, its newest life that has events
        self._alarms: set[str] = set()  # kinds of all alarms that were ever raised
        self._held: set[tuple[str, str, str]] = set()  # role, kind of an alarm, and what the alarm is about

    def read(self, *, at_once: bool = False) -> None:
        if time.monotonic() < self._next_look and not at_once:
            return
        for events in self._reader.batches():
            for event in events:
                self._add(event)
        self._next_look = time.monotonic() + EVENTS_EVERY

    def _add(self, event: Mapping[str, object]) -> None:
        role, kind, life, data = str(event["role"]), str(event["kind"]), event.get("life"), event.get("data")
        self._counts[kind, str(event["severity"])] += 1
        if isinstance(life, int) and life > self._lives.get(role, 0):
            self._lives[role] = life  # the alarms of the life before are over
            self._held = {alarm for alarm in self._held if alarm[0] != role}
        if not isinstance(data, Mapping) or life != self._lives.get(role):
            return
        alarm = role, kind, str(data.get("of", ""))
        if data.get("alarm") == BEGAN:
            self._alarms.add(kind)
            self._held.add(alarm)
        elif data.get("alarm") == OVER:
            self._held.discard(alarm)

    def set(self, values: Values, *, is_alive: bool) -> None:
        """Set the metrics. `is_alive` tells whether any role is alive: otherwise no alarm holds."""
        values.set_all("tba_events_total", dict(self._counts))
        held = Counter(kind for _, kind, _ in self._held if is_alive)
        values.set_all("tba_alarms", {(kind,): held[kind] for kind in self._alarms})


class SizeMetrics:
    """The newest version, and the bytes that versions and checkpoints take."""

    def __init__(self, run: Run):
        self.run = run
        self._next_look = 0.0
        self._bytes: dict[str, int] = {}
        self._newest: Version | None = None

    def read(self, *, at_once: bool = False) -> None:
        if time.monotonic() < self._next_look and not at_once:
            return
        for prefix in (layout.VERSIONS, layout.CHECKPOINTS):
            entries = self.run.store.list(prefix)
            self._bytes[prefix.rstrip("/")] = sum(entry.size for entry in entries)
            folders = [folder for entry in entries if (folder := layout.parse_folder(entry.key))]
            complete = [version for version, name in folders if name == layout.MANIFEST]
            if prefix == layout.VERSIONS and complete:
                self._newest = max(complete, key=lambda version: version.order)
        self._next_look = time.monotonic() + SIZES_EVERY

    def set(self, values: Values, published: float | None) -> None:
        """Set the metrics. `published` is the newest version by the lease of a living trainer, if it says one."""
        stored = self._newest.number if self._newest else None
        values.set("tba_run_version", stored if published is None else published)
        for kind, size in self._bytes.items():
            values.set("tba_stored_bytes", size, kind)


def _read(run: Run, keys: Sequence[str], damage: DamageLog) -> Iterator[tuple[str, bytes]]:
    """Yield the key and the bytes of each object, in order. Missing objects are added to the damage."""
    for start in range(0, len(keys), _AT_ONCE):
        for key, read in records.read_each(run.store, keys[start : start + _AT_ONCE]):
            with damage.looking_at(key):
                yield key, read()
