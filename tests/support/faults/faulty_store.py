"""A store behind a proxy that injects faults."""

from pathlib import Path
from typing import NamedTuple, get_args

from benchmarks.harness.faulty_proxy import Fault, Proxy
from storage.objects.open_store import open_store
from storage.objects.store import Store

FAULTS: tuple[Fault, ...] = tuple(fault for fault in get_args(Fault) if fault not in ("pass", "stale"))
PART = 5 << 20  # the smallest part that a server accepts


class Faulty(NamedTuple):
    """A store that is reached through a proxy, and the same store behind the proxy."""

    store: Store
    proxy: Proxy
    behind: Store
    url: str
    folder: Path  # on this machine

    def impatient(self) -> Store:
        return open_store(self.url, deadline=0.8)
