"""Scores of versions, written once."""

import json

import pytest

from storage import layout
from storage.evaluations import Evaluations
from storage.run import Run
from tba.errors import Damaged
from tba.types import Score, Version
from tests.storage.synthetic import put

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def scores(version: Version, value: float) -> list[Score]:
    return [
        Score(version=version, step=version.number * 2, metric=metric, value=value, n=100, seconds=1.5)
        for metric in ("greedy", "sampled")
    ]


def test_scores_come_back_by_version(run: Run):
    evaluations = Evaluations(run)
    assert evaluations.done() == set()
    for version, value in ((Version(10, 1), 0.5), (Version(0, 1), 0.25), (Version(5, 2), 0.75)):
        evaluations.write(scores(version, value))
    assert evaluations.done() == {Version(0, 1), Version(10, 1), Version(5, 2)}
    expected = [*scores(Version(0, 1), 0.25), *scores(Version(10, 1), 0.5), *scores(Version(5, 2), 0.75)]
    assert evaluations.scores() == expected


@local
def test_a_version_is_evaluated_once(run: Run):
    Evaluations(run).write(scores(Version(0, 1), 0.25))
    Evaluations(run).write(scores(Version(0, 1), 0.99))
    assert Evaluations(run).scores() == scores(Version(0, 1), 0.25)


@local
def test_what_is_no_evaluation_is_passed_over_and_one_of_another_shape_is_named(run: Run):
    Evaluations(run).write(scores(Version(0, 1), 0.25))
    put(run, "evaluations/best.json", b"x")
    assert Evaluations(run).scores() == scores(Version(0, 1), 0.25)
    record = json.loads(run.store.read(layout.evaluation(Version(0, 1))))
    put(run, layout.evaluation(Version(0, 1)), json.dumps({**record, "scores": [{"value": 1}]}).encode())
    with pytest.raises(Damaged, match="of version 0, attempt 1"):
        Evaluations(run).scores()
