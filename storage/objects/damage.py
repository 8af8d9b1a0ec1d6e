"""Collects damaged and missing objects while a run is read. So a bad object does not stop the reading, and all bad
objects are found."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pyarrow as pa

from storage.objects import records
from tba.errors import Damaged, Missing, TBAError, first_line

IS_MISSING = "is missing"
TABLE = pa.schema({"key": pa.string(), "problem": pa.string()})

LookingAt = Callable[[str], AbstractContextManager[None]]
"""Takes the key of an object and returns a context in which that object is read. If the object is damaged or missing,
the context either raises an error, or records the damage and continues after its block."""


@dataclass(frozen=True, order=True)
class Damage:
    """One object of a run that cannot be used, and why."""

    key: str
    problem: str


class DamageLog:
    """The damaged and missing objects that one reading of a run has met. For each object, only the first problem is
    kept. Safe to use from several threads."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._adding = threading.Lock()

    def add(self, key: str, problem: str) -> None:
        with self._adding:
            self._problems.setdefault(key, problem)

    def add_all(self, other: "DamageLog") -> None:
        for damage in other.found():
            self.add(damage.key, damage.problem)

    def found(self) -> list[Damage]:
        """Return all damage, sorted by key."""
        return sorted(Damage(key, problem) for key, problem in self._problems.items())

    def table(self) -> pa.Table:
        return pa.Table.from_pylist([vars(damage) for damage in self.found()], TABLE)

    def __contains__(self, key: str) -> bool:
        return key in self._problems

    @contextmanager
    def looking_at(self, key: str) -> Iterator[None]:
        """If the block finds the object `key` damaged or missing, record the damage and continue after the block. An
        error of the store itself, for example if it does not answer, is raised."""
        try:
            with records.reading(key):
                yield
        except Missing:
            self.add(key, IS_MISSING)
        except (Damaged, pa.ArrowException) as error:
            self.add(key, _reason(error, key))
        except OSError as error:
            if isinstance(error, TBAError):
                raise
            self.add(key, f"cannot be read: {error.strerror or error}")


def raising(url: str) -> LookingAt:
    """Return a `LookingAt` for readers that cannot continue without an object. Its contexts raise Damaged, naming the
    object below `url`. They let Missing pass."""
    return lambda key: records.reading(f"{url}/{key}")


def _reason(error: Exception, key: str) -> str:
    """Return the first line of an error's message, without the name of the object and what comes before the name."""
    said = first_line(error)
    _, named, rest = said.partition(key)
    return (rest if named else said).strip(" :") or "is not understood"
