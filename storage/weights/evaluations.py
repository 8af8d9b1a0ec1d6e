"""Scores of versions, and examples of their responses: one record per version, written once.

Each record names the record that was written before it. So a check finds a record that was lost or replaced, and the
version of a lost record is not evaluated again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar

from storage import layout
from storage.objects import records
from storage.objects.damage import LookingAt, raising
from storage.runs.attempts import chain, stands
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged
from tba.types import Example, Score, Version

SCORE = ("metric", "value", "n", "seconds", "temperature", "top_p")
EXAMPLE = ("prompt_id", "prompt", "response", "answer", "reward")
T = TypeVar("T", Score, Example)


class Evaluations:
    """Stores and reads the scores and examples of a run's versions; see `EvaluationLog` in tba/interfaces.py."""

    def __init__(self, run: Run):
        self.run = run
        self._newest: dict[str, Any] | None = None  # link to the record that this object wrote last
        self._named: dict[str, Version | None] = {}  # by key of each record that was read: the version that it links to

    def write(self, scores: Sequence[Score], examples: Sequence[Example] = ()) -> None:
        """Store one record for each version among the scores, with the examples of the version. A version that has a
        record already keeps that record."""
        for version in sorted({score.version for score in scores}):
            own = [score for score in scores if score.version == version]
            record = {
                "version": version.number,
                "attempt": version.attempt,
                "step": own[0].step,
                "scores": [_fields(score, SCORE) for score in own],
                "examples": [_fields(example, EXAMPLE) for example in examples if example.version == version],
                "previous": self._newest or self._last_stored(),
                "created_at": records.now(),
            }
            try:
                self.run.store.create(layout.evaluation(version), data := records.encode(record))
            except AlreadyExists:
                continue
            self._newest = _link(version, data)

    def _last_stored(self) -> dict[str, Any] | None:
        """Return a link to the record of the newest version that has one; None if there is no record. Other processes
        may have written records, so it is unknown which one was written last."""
        versions = (layout.parse_evaluation(entry.key) for entry in self.run.store.list(layout.EVALUATIONS))
        newest = max((version for version in versions if version), key=lambda version: version.order, default=None)
        return _link(newest, self.run.store.read(layout.evaluation(newest))) if newest else None

    def done(self) -> set[Version]:
        """Return the versions that have scores, or had scores that are lost. Versions from which the current weights do
        not descend are left out, because versions of the same number will be published again."""
        spans = chain(self.run)
        keys = [entry.key for entry in self.run.store.list(layout.EVALUATIONS)]
        versions = [*map(layout.parse_evaluation, keys), *self._named_by(keys)]
        return {version for version in versions if version and stands(spans, version)}

    def _named_by(self, keys: Sequence[str]) -> list[Version | None]:
        """Return the versions of the records that the records under `keys` link to. Each record is read once."""
        new = [key for key in keys if key not in self._named and layout.is_part(key)]
        for key, data in zip(new, self.run.store.read_many(new), strict=True):
            try:
                self._named[key] = named_before(records.decode(data, f"{self.run.url}/{key}"))
            except Damaged:
                self._named[key] = None
        return list(self._named.values())

    def scores(self, looking_at: LookingAt | None = None) -> list[Score]:
        """Return the finite scores of all versions, oldest version first. The scores of a version are in the order in
        which they were written. A score that is not finite, as a task's own measure may be, is stored as null and left
        out here. `looking_at` decides what happens with a damaged record; by default Damaged is raised."""
        return self._all(_scores_in, looking_at)

    def examples(self, looking_at: LookingAt | None = None) -> list[Example]:
        """Return the examples of all versions, oldest version first. The examples of a version are in the order in
        which they were written. `looking_at` decides what happens with a damaged record, as in `scores`."""
        return self._all(examples_in, looking_at)

    def _all(self, parse: Callable[[Mapping[str, Any], str], list[T]], looking_at: LookingAt | None) -> list[T]:
        """Return what `parse` finds in each record, which it gets with the record's name."""
        keys = [entry.key for entry in self.run.store.list(layout.EVALUATIONS) if layout.is_part(entry.key)]
        found: list[T] = []
        for key, read in records.read_each(self.run.store, keys):
            with (looking_at or raising(self.run.url))(key):
                name = f"{self.run.url}/{key}"
                found += parse(_decoded(read(), key, name), name)
        return sorted(found, key=lambda it: it.version.order)


def read_scores(data: bytes, key: str) -> list[Score]:
    """Return the finite scores in the bytes of a record. Raise Damaged unless they are the record of this key."""
    record = _decoded(data, key, key)
    with records.reading(key):
        return _scores_in(record, key)


def _decoded(data: bytes, key: str, name: str) -> dict[str, Any]:
    record = records.decode(data, name, "version", "attempt", "step", "scores")
    if key != layout.evaluation(version := _version(record)):
        raise Damaged(f"{name} is the record of another version, {version}")
    return record


def named_before(record: Mapping[str, Any]) -> Version | None:
    """Return the version whose record was written before this record; None if this record does not say, as in older
    runs."""
    previous = record.get("previous")
    try:
        return Version(*records.integers(previous, "version", "attempt")) if previous else None
    except (KeyError, TypeError):
        return None


def examples_in(record: Mapping[str, Any], name: str) -> list[Example]:
    """Return the examples in the record `name`. Records of older runs have none. Raise Damaged, naming the first
    malformed example by its number from 0."""
    version, [step] = _version(record), records.integers(record, "step")
    examples: list[Example] = []
    for number, stored in enumerate(record.get("examples", ())):
        with records.reading(f"{name}: example {number}"):
            said = {field: stored[field] for field in EXAMPLE}
            example = records.known(Example, said, version=version, step=step)
            examples.append(replace(example, reward=math.nan) if example.reward is None else example)
    return examples


def _scores_in(record: Mapping[str, Any], _: str) -> list[Score]:
    version, [step] = _version(record), records.integers(record, "step")
    finite = [score for score in record["scores"] if score["value"] is not None]
    return [records.known(Score, score, version=version, step=step) for score in finite]


def _version(record: Mapping[str, Any]) -> Version:
    return Version(*records.integers(record, "version", "attempt"))


def _fields(score: Score | Example, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(score, name) for name in names}


def _link(version: Version, data: bytes) -> dict[str, Any]:
    return {"version": version.number, "attempt": version.attempt, "sha256": sha256(data).hexdigest()}
