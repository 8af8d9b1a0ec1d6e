"""Checks the digests of records: whether each record has a digest, and whether each record is the one that the next
record names."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from storage.maintenance.read_ahead import ReadAhead
from storage.objects import records
from storage.runs.run import Run
from tba.errors import Missing


class RecordDigests:
    """Reads the records of a run, and remembers the sha256 of each."""

    def __init__(self, run: Run, reading: ReadAhead):
        self.run, self._reading = run, reading
        self.unverified: list[str] = []  # keys of records that older versions wrote, without a digest
        self._lacking: list[str] = []  # keys of records without a digest, in runs whose records all have one
        self._sha256: dict[str, str] = {}
        self._links: list[tuple[str, str, str]] = []  # a record, the record that it names, and the stated sha256

    def read(self, key: str) -> bytes:
        data = self._reading.read(key)
        if key not in self._sha256:
            self._sha256[key] = sha256(data).hexdigest()
            if not records.has_digest(data):
                (self._lacking if self.run.owner_of(key).digests else self.unverified).append(key)
        return data

    def decode(self, key: str, *fields: str) -> dict[str, Any]:
        """Return the record stored at `key`. Raise Missing if there is none, and Damaged if it cannot be read or lacks
        one of the fields."""
        return records.decode(self.read(key), f"{self.run.url}/{key}", *fields)

    def link(self, key: str, previous: str, said: str | None) -> None:
        """Remember that the record `key` names the record `previous` with the sha256 `said`; `problems` compares them.
        Records that a fork inherits are left to the check of its parent."""
        if said and self.run.owner_of(key) is self.run:
            self._links.append((key, previous, said))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield keys of records with what is wrong: records without a digest in runs whose records all have one, and
        records that are missing or do not match the sha256 that the next record states."""
        for key in self._lacking:
            yield key, "has no digest, but every record of this run was written with one"
        for key, previous, said in self._links:
            try:
                actual = self._sha256.get(previous) or sha256(self.run.store.read(previous)).hexdigest()
            except Missing:
                yield previous, f"is missing, but {key} names it"
                continue
            if actual != said:
                yield previous, f"is not the record that {key} names: its sha256 differs"
