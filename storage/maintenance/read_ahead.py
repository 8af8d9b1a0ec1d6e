"""Reads objects ahead, several at the same time, for a reader that will need all of them. A single read from an object
store consists mostly of waiting."""

from collections.abc import Iterable

from storage.objects.store import Entry, Store
from tba.errors import StorageError

_SIDE_BY_SIDE = 32  # number of objects that are read at the same time
_BYTES = 64 << 20  # maximum bytes of objects that are read at the same time; a single object may be larger


class ReadAhead:
    """Reads objects of a store. From a remote store, an object is read together with those that follow in its listing.
    What was read ahead is returned once and then forgotten."""

    def __init__(self, store: Store, listings: Iterable[list[Entry]]):
        self._store = store
        self._waiting: dict[str, bytes] = {}
        self._after: dict[str, tuple[list[Entry], int]] = {}  # by key of an unread object: its listing and place there
        if store.local_path("run.json") is None:
            for listing in listings:
                self._after.update({entry.key: (listing, place) for place, entry in enumerate(listing)})

    def read(self, key: str) -> bytes:
        """Return the bytes of an object, as they are now or were shortly before. Raise Missing if the object does not
        exist."""
        if key not in self._waiting and key in self._after:
            self._fetch(key)
        data = self._waiting.pop(key, None)
        return self._store.read(key) if data is None else data

    def _fetch(self, key: str) -> None:
        listing, place = self._after[key]
        wanted, size = [key], listing[place].size
        for entry in listing[place + 1 : place + _SIDE_BY_SIDE]:
            if entry.key not in self._after:  # fetched already, because objects may be read in any order
                continue
            size += entry.size
            if size > _BYTES:
                break
            wanted.append(entry.key)
        for wanted_key in wanted:
            del self._after[wanted_key]
        try:
            self._waiting.update(zip(wanted, self._store.read_many(wanted), strict=True))
        except (StorageError, KeyError):
            return  # each object is then read by itself, which raises the error
