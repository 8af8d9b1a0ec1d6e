"""Writers that die at a chosen write."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from storage.objects.store import Store

WRITES = {"create": 0, "upload": 1, "replace": 0, "delete": 0, "discard": 0}
"""Methods that write, with the position of the key in their arguments."""


every_write = pytest.mark.parametrize(
    "every", [pytest.param(False, id="a sample"), pytest.param(True, id="every write", marks=pytest.mark.long)]
)
"""Let something happen at one write of each kind, or at every write."""


class Killed(BaseException): ...


class Watched:
    """A store that calls `happen` at its n-th write. Once `dead`, all of its writes raise Killed."""

    def __init__(self, store: Store, at: int, happen: Callable[[str, str], None]):
        self.store, self.at, self.happen = store, at, happen
        self.writes: list[tuple[str, str]] = []
        self.dead = False
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        return partial(self.write, name, method) if name in WRITES else method

    def write(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        key = arguments[WRITES[name]]
        if not key.startswith("control/"):  # writes that prove that the store is safe
            with self.lock:
                self.writes.append((name, key))
                if len(self.writes) == self.at:
                    self.happen(name, key)
            if self.dead:
                raise Killed
        return method(*arguments, **named)


def first_of_each_kind(writes: Sequence[tuple[str, str]]) -> list[int]:
    """Return the numbers, from 1, of the writes with which another kind of write to another folder begins."""
    kinds = [(name, key.rpartition("/")[0]) for name, key in writes]
    return [number for number, kind in enumerate(kinds, start=1) if kind not in kinds[: number - 1]]
