"""Scores of versions: one record per version, written once."""

from collections.abc import Sequence

from storage import layout, records
from storage.attempts import chain, stands
from storage.run import Run
from tba.errors import AlreadyExists
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

    def scores(self) -> list[Score]:
        """Every score, oldest version first, those of a version in the order in which they were written. One that was
        not finite, as a task's own measure may be, is null where it is stored and is left out."""
        found: list[Score] = []
        for record in records.read_all(self.run.store, layout.EVALUATIONS, "version", "attempt", "step", "scores"):
            of = f"version {record['version']}, attempt {record['attempt']}"
            with records.reading(f"{self.run.url}/{layout.EVALUATIONS}: of {of}"):
                number, attempt, step = records.integers(record, "version", "attempt", "step")
                version = Version(number, attempt)
                finite = [score for score in record["scores"] if score["value"] is not None]
                found += [records.known(Score, score, version=version, step=step) for score in finite]
        return sorted(found, key=lambda score: score.version.order)
