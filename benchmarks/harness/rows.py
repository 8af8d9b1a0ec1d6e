"""Reads and appends the rows of a CSV, each a dataclass of numbers and text, and formats the mean of several values."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from flows.pages.charts import Series

Row = TypeVar("Row")


def read(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a CSV. The list is empty if there is no file yet."""
    if not path.exists():
        return []
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    with path.open(newline="") as file:
        return [kind(**{name: types[name](it) for name, it in row.items()}) for row in csv.DictReader(file)]


def append(path: Path, row: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names: Sequence[str] = list(asdict(row))
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and standard error as text. Empty if there are no values."""
    if not values:
        return ""
    error = f" ± {standard_error(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def line(name: str, values: Mapping[float, Sequence[float]]) -> Series:
    """Return a line of means with their standard errors, where there are values."""
    known = {x: found for x, found in values.items() if found}
    points = [(x, statistics.mean(found)) for x, found in known.items()]
    return Series(name, points, marked=True, errors=[standard_error(found) for found in known.values()])
