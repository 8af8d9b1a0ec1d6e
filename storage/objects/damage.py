"""Collects damaged and missing objects while a run is read, so that one bad object hides no other."""

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
"""Makes the context in which readers look at an object, from its key. The context raises Damaged, or notes what is
wrong and lets readers go on with the next object."""


@dataclass(frozen=True, order=True)
class Damage:
    """One object of a run that cannot be used, and why."""

    key: str
    problem: str


class DamageLog:
    """The damage that one look at a run has met. Each object has the problem that was found first. Safe to use from
    several threads."""

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
        """Return all damage, in the order of the keys."""
        return sorted(Damage(key, problem) for key, problem in self._problems.items())

    def table(self) -> pa.Table:
        return pa.Table.from_pylist([vars(damage) for damage in self.found()], TABLE)

    def __contains__(self, key: str) -> bool:
        return key in self._problems

    @contextmanager
    def looking_at(self, key: str) -> Iterator[None]:
        """Note what the block finds wrong with an object, and continue after the block. A store that does not answer
        is no damage: its error is raised."""
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
    """Return the contexts of readers that cannot go on without an object. They raise Damaged, which names the object
    below `url`."""
    return lambda key: records.reading(f"{url}/{key}")


def _reason(error: Exception, key: str) -> str:
    """Return the first line of an error's message, without the name of the object."""
    said = first_line(error)
    _, named, rest = said.partition(key)
    return (rest if named else said).strip(" :") or "is not understood"
