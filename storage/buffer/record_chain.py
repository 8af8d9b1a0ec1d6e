"""The records of a run, one after the other: each is read, or is created by the newest attempt of the trainer."""

from hashlib import sha256

from storage import layout
from storage.log.syncs import StoredRecord, SyncRecord, encode, read_record
from storage.runs.attempts import newest_attempt
from storage.runs.run import Run
from tba.errors import AlreadyExists, Missing, Superseded


class RecordChain:
    """Each record names the sha256 of the one before, so the chain knows that of the newest one."""

    def __init__(self, run: Run, attempt: int):
        self.newest_sha256: str | None = None  # of the newest record that was appended
        self._run, self._attempt = run, attempt

    def has(self, sync: int) -> bool:
        return self._run.store.exists(layout.sync(sync))

    def read(self, sync: int) -> StoredRecord | None:
        """Return the record that follows the newest one; None if it is not there."""
        return read_record(self._run, sync, previous_sha256=self.newest_sha256)

    def create(self, record: SyncRecord) -> StoredRecord:
        """Store a record. If another was first, that one is the fact and is returned, as long as this attempt is still
        the newest."""
        data = encode(record)
        try:
            self._run.store.create(layout.sync(record.sync), data)
        except AlreadyExists:
            self.check_attempt()
            stored = self.read(record.sync)
            if stored is None:
                raise Missing(f"{self._run.url}/{layout.sync(record.sync)} was there and is gone") from None
            return stored
        return StoredRecord(record, sha256(data).hexdigest())

    def append(self, stored: StoredRecord) -> None:
        """Let a record be the newest one."""
        self.newest_sha256 = stored.sha256

    def check_attempt(self) -> None:
        """Raise Superseded unless this attempt is the newest."""
        newest = newest_attempt(self._run)
        if newest > self._attempt:
            raise Superseded(f"attempt {newest} of the trainer has taken over from attempt {self._attempt}")
