"""Reads objects that will all be asked for, several of them side by side: most of the time of a single read from an
object store is waiting."""

from collections.abc import Iterable

from storage.objects.store import Entry, Store
from tba.errors import StorageError

_SIDE_BY_SIDE = 32  # objects read at once
_BYTES = 64 << 20  # that wait to be asked for, but for one object that is larger


class ReadAhead:
    """The reading side of a store. Objects of one folder are read together with those that follow in the listing, and
    each is handed over once."""

    def __init__(self, store: Store, listings: Iterable[list[Entry]]):
        self._store = store
        self._waiting: dict[str, bytes] = {}
        self._after: dict[str, tuple[list[Entry], int]] = {}  # where in its listing each object comes
        if store.local_path("run.json") is None:
            for listing in listings:
                self._after.update({entry.key: (listing, place) for place, entry in enumerate(listing)})

    def read(self, key: str) -> bytes:
        """Return an object as it was once since this was made; Missing if it is gone."""
        if key not in self._waiting and key in self._after:
            self._fetch(key)
        data = self._waiting.pop(key, None)
        return self._store.read(key) if data is None else data

    def _fetch(self, key: str) -> None:
        listing, place = self._after[key]
        wanted, size = [key], listing[place].size
        for entry in listing[place + 1 : place + _SIDE_BY_SIDE]:
            if entry.key not in self._after:  # fetched already: they may be asked for in any order
                continue
            size += entry.size
            if size > _BYTES:
                break
            wanted.append(entry.key)
        for it in wanted:
            del self._after[it]
        try:
            self._waiting.update(zip(wanted, self._store.read_many(wanted), strict=True))
        except (StorageError, KeyError):
            return  # each is asked for by itself, and says what is wrong
