"""How trajectories, versions and records are kept: one folder or bucket, immutable objects, SQL over all of them.

From a notebook or another program:

    import storage
    con = storage.connect("tba-runs/runs/first")
    con.sql("select version_start, avg(reward) from trajectories group by 1 order by 1").show()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.run import Run, default_root, resolve, run_urls
    from storage.store import Store, open_store, probe
    from storage.views import connect

__all__ = ["Run", "Store", "connect", "default_root", "open_store", "probe", "resolve", "run_urls"]

_HOMES = {
    "Run": "storage.run",
    "Store": "storage.store",
    "connect": "storage.views",
    "default_root": "storage.run",
    "open_store": "storage.store",
    "probe": "storage.store",
    "resolve": "storage.run",
    "run_urls": "storage.run",
}


def __getattr__(name: str) -> Any:
    """Public names load their module when they are first used, so that importing one part does not import all."""
    if name not in _HOMES:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
