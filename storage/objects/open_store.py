"""Opens the store at a URL, and checks that a store keeps the promises that a run depends on."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from storage.objects.local_store import LocalStore
from storage.objects.store import Store
from tba.errors import AlreadyExists, ConfigError, Conflict, UnsafeStore

STORES = {
    "s3": "storage.objects.s3.store:S3Store",
}
"""Module and class of the store for each scheme of a URL. The module is imported when the first store of that scheme is
opened."""


def open_store(url: str, *, deadline: float = 60.0) -> Store:
    """Return the store at a path, a `file://` URL or an `s3://bucket/prefix` URL. `deadline` is the most seconds that
    one request to S3 takes, including retries; a local store has no deadline. Keys, region and endpoint of S3 come from
    the usual AWS_* environment variables."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if scheme == "file":
        return LocalStore(rest)
    if scheme not in STORES:
        known = " or ".join(f"{name}://…" for name in STORES)
        raise ConfigError(f"a store is a path, file://… or {known}, got {scheme}://…")
    module, _, name = STORES[scheme].partition(":")
    return getattr(import_module(module), name)(url, deadline=deadline)


def probe(store: Store, *, racers: int = 4) -> None:
    """Check that `create` and `replace` of a store are conditional: `create` must refuse a name that is taken, and
    `replace` an outdated tag. `racers` threads create the same object at the same time. Raise UnsafeStore, naming the
    store, if a check fails."""
    key = f"control/probe/{secrets.token_hex(8)}"
    try:
        _probe_create(store, key, racers)
        _probe_replace(store, key)
    finally:
        store.delete(key)


def _probe_create(store: Store, key: str, racers: int) -> None:
    def create(racer: int) -> bool:
        try:
            store.create(key, b"%d" % racer)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(racers) as pool:
        winners = [racer for racer, won in enumerate(pool.map(create, range(racers))) if won]
    if len(winners) != 1 or create(racers) or store.read(key) != b"%d" % winners[0]:
        raise _unsafe(store, "an object whose name was taken could be created again")


def _probe_replace(store: Store, key: str) -> None:
    found = store.read_tagged(key)
    if found is None:
        raise _unsafe(store, "an object that was just written cannot be read")
    try:
        tag = store.replace(key, b"second", tag=found[1])
    except Conflict:
        raise _unsafe(store, "an unchanged object could not be replaced") from None
    for stale in (found[1], None):
        try:
            store.replace(key, b"third", tag=stale)
        except Conflict:
            continue
        raise _unsafe(store, "an object could be replaced with an outdated tag")
    if store.read_tagged(key) != (b"second", tag):
        raise _unsafe(store, "an object is not what was last written")


def _unsafe(store: Store, what: str) -> UnsafeStore:
    return UnsafeStore(
        f"{store}: this store ignores conditional writes ({what}), so two processes could overwrite each other's "
        "work. Use a local folder or an S3 server that honours If-None-Match and If-Match, such as AWS S3 or Ceph"
    )
