"""Tunes two settings by a local search, the same for every arm of a study.

Each setting has a ladder of values, and a point is a rung of each. The search begins with the point where both ladders
start. It tries all neighbours of the best point: one rung up or down of one ladder. If one of them is better, the best
of them is the new best point, and its neighbours are tried, and so on. So the chosen point is better than all its
neighbours, unless a ladder ends there.

Each point is tried on several seeds, and its score is the mean. A point whose first seed is more than `HOPELESS` below
the mean of the best point is not tried on the other seeds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

HOPELESS = 0.1
Point = tuple[int, int]
Scores = Mapping[Point, Sequence[float]]  # of each point, in the order of the seeds; none is missing before another


@dataclass(frozen=True)
class Ladder:
    setting: str
    values: Sequence[float]
    start: int  # the rung at which the search begins

    def __post_init__(self) -> None:
        if list(self.values) != sorted(set(self.values)) or not 0 <= self.start < len(self.values):
            raise ValueError(f"{self.setting}: a ladder needs ascending values and a start among them, got {self}")


FIXED = Ladder("", (0.0,), 0)
"""The ladder of an arm that has only one setting to tune."""


@dataclass(frozen=True)
class Search:
    ladders: tuple[Ladder, Ladder]
    seeds: int

    def progress(self, scores: Scores) -> tuple[Point, list[tuple[Point, int]]]:
        """Return the best point so far, and the points to try next, each with the index of a seed. None are left when
        the search has ended. Of equal points, the one with lower rungs is better. A single point needs no search."""
        here = self.start
        if not any(self.neighbours(here)):
            return here, []
        if missing := self._missing([here], scores, -math.inf):
            return here, missing
        while True:
            reached = mean(scores[here])
            if missing := self._missing(self.neighbours(here), scores, reached - HOPELESS):
                return here, missing
            whole = [it for it in self.neighbours(here) if len(scores[it]) == self.seeds]
            better = [it for it in whole if mean(scores[it]) > reached]
            if not better:
                return here, []
            here = max(better, key=lambda it: (mean(scores[it]), -it[0], -it[1]))

    def _missing(self, points: Iterable[Point], scores: Scores, floor: float) -> list[tuple[Point, int]]:
        tried = [(it, scores.get(it, ())) for it in points]
        return [(it, len(of)) for it, of in tried if len(of) < self.seeds and not (of and of[0] < floor)]

    @property
    def start(self) -> Point:
        first, second = self.ladders
        return first.start, second.start

    def neighbours(self, point: Point) -> Iterator[Point]:
        for axis, ladder in enumerate(self.ladders):
            for rung in (point[axis] - 1, point[axis] + 1):
                if 0 <= rung < len(ladder.values):
                    yield (rung, point[1]) if axis == 0 else (point[0], rung)
