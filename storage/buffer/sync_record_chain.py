"""Reads and creates the sync records of a run, for one attempt of the trainer."""

from hashlib import sha256

from storage import layout
from storage.log.sync_records import StoredRecord, SyncRecord, encode, read_record
from storage.runs.attempts import newest_attempt
from storage.runs.run import Run
from tba.errors import AlreadyExists, Missing, Superseded


class RecordChain:
    """Reads and creates sync records in order. Each record holds the sha256 of the previous record, so this object
    remembers the sha256 of the newest."""

    def __init__(self, run: Run, attempt: int):
        self.newest_sha256: str | None = None  # sha256 of the record that was appended last
        self._run, self._attempt = run, attempt

    def has(self, sync: int) -> bool:
        return self._run.store.exists(layout.sync(sync))

    def read(self, sync: int) -> StoredRecord | None:
        """Return the record of a sync, which must follow the newest record; None if it is not stored. Raise Damaged if
        it does not hold the sha256 of the newest record."""
        return read_record(self._run, sync, previous_sha256=self.newest_sha256)

    def create(self, record: SyncRecord) -> StoredRecord:
        """Store a sync record and return it. If another process has stored a record for this sync first, return that
        record instead, or raise Superseded if this attempt is no longer the newest."""
        data = encode(record)
        try:
            self._run.store.create(layout.sync(record.sync), data)
        except AlreadyExists:
            self.check_attempt()
            stored = self.read(record.sync)
            if stored is None:
                raise Missing(f"{self._run.url}/{layout.sync(record.sync)} existed but has been removed") from None
            return stored
        return StoredRecord(record, sha256(data).hexdigest())

    def append(self, stored: StoredRecord) -> None:
        """Remember a stored record as the newest one, which the next sync record follows."""
        self.newest_sha256 = stored.sha256

    def check_attempt(self) -> None:
        """Raise Superseded unless this attempt is the newest."""
        newest = newest_attempt(self._run)
        if newest > self._attempt:
            raise Superseded(f"attempt {newest} of the trainer has taken over from attempt {self._attempt}")
