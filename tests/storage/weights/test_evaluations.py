"""Scores of versions, written once."""

import json
from pathlib import Path

import pytest

import storage
from storage import layout
from storage.objects import manifest_folders
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.evaluations import Evaluations
from tba.errors import Damaged
from tba.types import Score, Version
from tests.support.faults.rewriting import with_digest
from tests.support.storage.synthetic import LAST_SYNC, SyntheticRun, put

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def scores(version: Version, value: float) -> list[Score]:
    return [
        Score(
            version=version,
            step=version.number * 2,
            metric=metric,
            value=value,
            n=100,
            seconds=1.5,
            temperature=0.35,
            top_p=0.9,
        )
        for metric in ("greedy", "sampled", "pass@4", "pass@16")
    ]


def test_scores_come_back_by_version(run: Run):
    evaluations = Evaluations(run)
    assert evaluations.done() == set()
    claim_attempt(run)
    for version, value in ((Version(10, 1), 0.5), (Version(0, 1), 0.25), (Version(5, 1), 0.75)):
        evaluations.write(scores(version, value))
    assert evaluations.done() == {Version(0, 1), Version(10, 1), Version(5, 1)}
    expected = [*scores(Version(0, 1), 0.25), *scores(Version(5, 1), 0.75), *scores(Version(10, 1), 0.5)]
    assert evaluations.scores() == expected


def test_a_version_that_is_taken_again_after_a_crash_is_still_to_be_scored(tmp_path: Path):
    made = SyntheticRun(str(tmp_path), "first").begin()
    made.take_syncs(1, range(1, LAST_SYNC + 1), made.buffer(1))
    for version in (Version(2, 1), Version(LAST_SYNC, 1)):
        made.evaluate(version, 0.5)
    assert Version(LAST_SYNC, 1) in Evaluations(made.run).done()
    manifest_folders.remove(
        made.run.store, layout.checkpoint(Version(LAST_SYNC, 1))
    )  # the evaluator was killed before the object was complete
    assert claim_attempt(made.run).continues == Version(2, 1)
    assert Evaluations(made.run).done() == {Version(0, 1), Version(2, 1)}


@local
def test_a_version_is_evaluated_once(run: Run):
    Evaluations(run).write(scores(Version(0, 1), 0.25))
    Evaluations(run).write(scores(Version(0, 1), 0.99))
    assert Evaluations(run).scores() == scores(Version(0, 1), 0.25)


@local
def test_scores_from_before_sampling_settings_were_stored_are_read(run: Run):
    claim_attempt(run)
    Evaluations(run).write(scores(Version(0, 1), 0.25))
    record = json.loads(run.store.read(layout.evaluation(Version(0, 1))))
    for score in record["scores"]:
        assert (score.pop("temperature"), score.pop("top_p")) == (0.35, 0.9)
    put(run, layout.evaluation(Version(0, 1)), with_digest(record))
    assert {(s.temperature, s.top_p, s.value) for s in Evaluations(run).scores()} == {(None, None, 0.25)}
    with storage.connect(run) as con:
        query = "select distinct temperature, top_p, value from evaluations"
        assert con.execute(query).fetchall() == [(None, None, 0.25)]


@local
def test_what_is_no_evaluation_is_passed_over_and_one_of_another_shape_is_named(run: Run):
    Evaluations(run).write(scores(Version(0, 1), 0.25))
    put(run, "evaluations/best.json", b"x")
    assert Evaluations(run).scores() == scores(Version(0, 1), 0.25)
    record = json.loads(run.store.read(layout.evaluation(Version(0, 1))))
    put(run, layout.evaluation(Version(0, 1)), with_digest({**record, "scores": [{"value": 1}]}))
    with pytest.raises(Damaged, match=r"evaluations/000000-a0001\.json"):
        Evaluations(run).scores()
