"""The size and sha256 of an object, as the record about the object holds them. A reader of the object compares the
object with both."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

from storage.objects import records
from tba.errors import Damaged


@dataclass(frozen=True)
class Digest:
    size: int  # in bytes
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(len(data), sha256(data).hexdigest())

    @classmethod
    def decode(cls, said: Mapping[str, Any]) -> Self:
        """Return the digest that `encode` has written into a record. Raise KeyError or TypeError if there is none;
        within `records.reading`, these errors become Damaged, which names the record."""
        return records.known(cls, {"size": said["bytes"], "sha256": said["sha256"]})

    def encode(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.sha256}

    def verify(self, data: bytes, name: str) -> None:
        """Raise Damaged, naming the object, unless `data` has this size and sha256."""
        if len(data) != self.size:
            raise Damaged(f"{name} has {len(data)} bytes, but its record says {self.size}")
        if sha256(data).hexdigest() != self.sha256:
            raise Damaged(f"{name} is not what its record says: its sha256 differs")
