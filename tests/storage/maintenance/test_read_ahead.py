"""Reading ahead returns the requested objects, also if some of them are gone."""

import random
from pathlib import Path

import pytest

from storage.maintenance.read_ahead import ReadAhead
from storage.objects.local_store import LocalStore
from storage.objects.store import Store
from tba.errors import Missing


class Counting:
    """A remote store that counts requests."""

    def __init__(self, store: Store):
        self.store, self.requests = store, 0

    def read(self, key: str) -> bytes:
        self.requests += 1
        return self.store.read(key)

    def read_many(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return [self.store.read(key) for key in keys]

    def local_path(self, key: str) -> None:
        return None


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    for folder in ("syncs", "steps"):
        for number in range(100):
            store.create(f"{folder}/{number:06d}.json", f"{folder} {number}".encode())
    return store


def test_each_object_is_what_is_stored_and_few_requests_are_made(store: LocalStore):
    remote = Counting(store)
    listings = [store.list("syncs/"), store.list("steps/")]
    reading = ReadAhead(remote, listings)  # pyright: ignore[reportArgumentType]
    for entries in zip(*listings, strict=True):
        for entry in entries:
            assert reading.read(entry.key) == store.read(entry.key)
    assert remote.requests == 8


@pytest.mark.parametrize("seed", range(3))
def test_objects_of_one_listing_are_asked_for_in_any_order(store: LocalStore, seed: int):
    listing = store.list("syncs/")
    reading = ReadAhead(Counting(store), [listing])  # pyright: ignore[reportArgumentType]
    for entry in random.Random(seed).sample(listing, len(listing)):
        assert reading.read(entry.key) == store.read(entry.key)


def test_one_that_is_gone_keeps_nobody_from_the_others(store: LocalStore):
    listing = store.list("syncs/")
    store.delete(listing[3].key)
    reading = ReadAhead(Counting(store), [listing])  # pyright: ignore[reportArgumentType]
    for place, entry in enumerate(listing):
        if place == 3:
            with pytest.raises(Missing, match=entry.key):
                reading.read(entry.key)
        else:
            assert reading.read(entry.key) == store.read(entry.key)


def test_what_is_not_listed_and_what_is_asked_for_again_is_read_as_it_is_then(store: LocalStore):
    reading = ReadAhead(Counting(store), [store.list("syncs/")[:2]])  # pyright: ignore[reportArgumentType]
    assert reading.read("steps/000007.json") == b"steps 7"
    assert reading.read("syncs/000000.json") == b"syncs 0"
    store.delete("syncs/000000.json")
    store.create("syncs/000000.json", b"another")
    assert reading.read("syncs/000000.json") == b"another"
