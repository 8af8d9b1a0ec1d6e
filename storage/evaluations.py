"""Scores of versions: one record per version, written once."""

from collections.abc import Sequence

from storage import layout, records
from storage.attempts import chain, stands
from storage.damage import LookingAt, raising
from storage.run import Run
from tba.errors import AlreadyExists, Damaged
from tba.types import Score, Version

SCORE = ("metric", "value", "n", "seconds", "temperature", "top_p")


class Evaluations:
    """The `EvaluationLog` of a run."""

    def __init__(self, run: Run):
        self.run = run

    def write(self, scores: Sequence[Score]) -> None:
        """Store the scores of each version. One that was evaluated before keeps its scores."""
        for version in sorted({score.version for score in scores}):
            own = [score for score in scores if score.version == version]
            record = {
                "version": version.number,
                "attempt": version.attempt,
                "step": own[0].step,
                "scores": [{name: getattr(score, name) for name in SCORE} for score in own],
                "created_at": records.now(),
            }
            try:
                self.run.store.create(layout.evaluation(version), records.encode(record))
            except AlreadyExists:
                continue

    def done(self) -> set[Version]:
        """Versions that have scores and that the current weights descend from: the others' numbers come again."""
        spans = chain(self.run)
        found = (layout.parse_evaluation(entry.key) for entry in self.run.store.list(layout.EVALUATIONS))
        return {version for version in found if version and stands(spans, version)}

    def scores(self, looking_at: LookingAt | None = None) -> list[Score]:
        """Every score, oldest version first, those of a version in the order in which they were written. One that was
        not finite, as a task's own measure may be, is null where it is stored and is left out. `looking_at` decides
        what becomes of a damaged record: Damaged is raised unless it says otherwise."""
        keys = [entry.key for entry in self.run.store.list(layout.EVALUATIONS) if layout.is_part(entry.key)]
        found: list[Score] = []
        for key, read in records.read_each(self.run.store, keys):
            with (looking_at or raising(self.run.url))(key):
                found += _scores(read(), f"{self.run.url}/{key}")
        return sorted(found, key=lambda score: score.version.order)


def _scores(data: bytes, name: str) -> list[Score]:
    record = records.decode(data, name, "version", "attempt", "step", "scores")
    number, attempt, step = records.integers(record, "version", "attempt", "step")
    version = Version(number, attempt)
    if not name.endswith(layout.evaluation(version)):
        raise Damaged(f"{name} says it is of version {version}")
    finite = [score for score in record["scores"] if score["value"] is not None]
    return [records.known(Score, score, version=version, step=step) for score in finite]
