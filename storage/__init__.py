"""Stores the trajectories, versions and records of runs as objects in a folder or a bucket, and offers SQL over them.

From a notebook or another program:

    import storage
    con = storage.connect("tba-runs/runs/first")
    con.sql("select version_start, avg(reward) from trajectories group by 1 order by 1").show()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.objects.open_store import open_store, probe
    from storage.objects.store import Store
    from storage.queries.views import connect
    from storage.runs.run import Run, default_root, resolve, run_urls

__all__ = ["Run", "Store", "connect", "default_root", "open_store", "probe", "resolve", "run_urls"]

_HOMES = {
    "Run": "storage.runs.run",
    "Store": "storage.objects.store",
    "connect": "storage.queries.views",
    "default_root": "storage.runs.run",
    "open_store": "storage.objects.open_store",
    "probe": "storage.objects.open_store",
    "resolve": "storage.runs.run",
    "run_urls": "storage.runs.run",
}


def __getattr__(name: str) -> Any:
    """Return a public name, and import its module only now. So importing one part of storage does not import all of
    it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
