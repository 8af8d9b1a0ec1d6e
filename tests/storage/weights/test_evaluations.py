"""Scores of versions and examples of their responses, written once."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import storage
from storage import layout
from storage.maintenance.check import check
from storage.objects import manifest_folders
from storage.objects.damage import DamageLog
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.evaluations import Evaluations
from tba.errors import Damaged
from tba.types import Score, Version
from tests.support.builders import make_example
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


# --- examples -------------------------------------------------------------------------------------------------------

V0, V2 = Version(0, 1), Version(2, 1)


def test_examples_come_back_by_version_in_the_order_in_which_they_were_written(run: Run):
    evaluations = Evaluations(run)
    later = [make_example(V2, prompt, step=4, response=prompt) for prompt in ("test/1", "test/0")]
    first = [make_example(V0, reward=0.25, answer="", response="several\nlines \0 and \u202e")]
    evaluations.write(scores(V2, 0.5), later)
    evaluations.write(scores(V0, 0.25), first)
    assert evaluations.examples() == first + later


@local
def test_a_reward_that_is_not_finite_is_stored_as_none(run: Run):
    claim_attempt(run)
    Evaluations(run).write(scores(V0, 0.25), [make_example(V0, reward=value) for value in (math.inf, 1.0)])
    assert [math.isnan(it.reward) for it in Evaluations(run).examples()] == [True, False]
    with storage.connect(run) as con:
        assert con.execute("select reward from examples").fetchall() == [(None,), (1.0,)]


def stored_with(run: Run, **changes: Any) -> str:
    """Store an evaluation with two examples, change fields of its record, and return its key."""
    key = layout.evaluation(V0)
    Evaluations(run).write(scores(V0, 0.25), [make_example(V0), make_example(V0, "test/1")])
    record = json.loads(run.store.read(key)) | changes
    put(run, key, with_digest({name: value for name, value in record.items() if value != "removed"}))
    return key


@local
def test_a_record_from_before_examples_were_stored_has_none(run: Run):
    claim_attempt(run)
    stored_with(run, examples="removed")
    assert Evaluations(run).examples() == []
    assert Evaluations(run).scores() == scores(V0, 0.25)
    with storage.connect(run) as con:
        assert con.execute("select count(*) from examples").fetchall() == [(0,)]
        assert con.execute("select count(*) from evaluations").fetchall() == [(4,)]
        assert con.execute("from damage where key like 'evaluations/%'").fetchall() == []


GOOD = {"prompt_id": "test/0", "prompt": "1+2=", "response": "3", "answer": "3", "reward": 1.0}


@local
@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ([GOOD, {**GOOD, "reward": "1"}], "example 1 cannot be decoded: reward is of type str, not float"),
        ([{name: it for name, it in GOOD.items() if name != "response"}], "example 0 lacks 'response'"),
        ([GOOD, GOOD, "3"], "example 2 cannot be decoded: string indices must be integers"),
        (7, "cannot be decoded: 'int' object is not iterable"),
    ],
)
def test_a_malformed_example_is_named_and_the_scores_beside_it_are_read(run: Run, examples: Any, problem: str):
    claim_attempt(run)
    key = stored_with(run, examples=examples)
    with pytest.raises(Damaged, match=f"{key}.*{problem}"):
        Evaluations(run).examples()
    assert Evaluations(run).scores() == scores(V0, 0.25)
    assert any(it.key == key and problem in it.problem for it in check(run).problems)
    with storage.connect(run) as con:
        [(named, said)] = con.execute("from damage where key like 'evaluations/%'").fetchall()
        assert named == key and said.startswith(problem)
        assert con.execute("select count(*) from examples").fetchall() == [(0,)]
        assert con.execute("select count(*) from evaluations").fetchall() == [(4,)]


@local
def test_the_examples_of_a_damaged_record_are_left_out_where_that_is_wanted(run: Run):
    key = stored_with(run)
    Evaluations(run).write(scores(V2, 0.5), [make_example(V2, step=4)])
    put(run, key, b"{")
    damage = DamageLog()
    assert Evaluations(run).examples(damage.looking_at) == [make_example(V2, step=4)]
    assert [it.key for it in damage.found()] == [key]
