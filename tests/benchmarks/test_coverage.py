"""The coverage of searchers: which right answers count, from which moment, and the table of stored rows."""

import math
from datetime import UTC, datetime
from pathlib import Path

import storage
from benchmarks.science.old_data import coverage
from benchmarks.science.old_data.rare_answers import is_rare
from storage.log.trajectories import Trajectories
from tba.tasks.registry import preset_of
from tests.support.builders import make_trajectory
from tests.support.storage.synthetic import make_live_run


def test_the_settings_are_accepted_together_and_every_count_has_the_same():
    config = preset_of(coverage.TASK).replace({**coverage.BASE, "task.name": coverage.TASK, "training.steps": 1000})
    assert config.search.responses_per_prompt >= config.training.responses_per_prompt


def test_all_known_answers_are_right_and_different():
    known = coverage.known()
    assert len(set(known)) == len(known) > 1000
    assert len({total for total, _ in known}) == 32
    assert all(is_rare(answer, total) for total, answer in known)


def test_each_right_answer_counts_once_from_when_it_was_first_generated(tmp_path: Path):
    first, second = (datetime(2027, 1, day, tzinfo=UTC) for day in (1, 2))
    generated = [("b", 1.0, second), ("a", 1.0, second), ("a", 1.0, first), ("c", 0.0, first)]
    run = make_live_run(str(tmp_path))  # what it has itself is older
    for seq, (text, reward, moment) in enumerate(generated):
        one = make_trajectory(response=text, reward=reward, tokens=(ord(text), 2), searcher=7, created_at=moment)
        Trajectories(run).append(7, seq, [one])

    def found(ends: datetime) -> list[datetime]:
        with storage.connect(run.url) as con:
            rows = con.execute(coverage.FOUND, {"ends": ends.replace(tzinfo=None)}).fetchall()
        return [moment.replace(tzinfo=UTC) for (moment,) in rows if moment.year == 2027]

    assert found(second) == [first, second]
    assert found(first) == [first]


def row(seed: int, found: int, to_10: float) -> coverage.Row:
    return coverage.Row(
        searchers=2, seed=seed, minutes=1.0, base_right=2e-5, ideal_right=1.0, generated=1000, steps=50, found=found,
        known=200, to_1=4.0, to_10=to_10, to_100=math.inf, right=0.5, total_variation=0.5, log_probability=-9.0,
    )  # fmt: skip


def test_the_table_says_how_many_seeds_got_there():
    *_, line = coverage.markdown([row(0, 20, 30.0), row(1, 40, math.inf)])
    assert line == (
        "| 2 | 2 | 1000 ± 0 | 50 ± 0 | 0.150 ± 0.050 | 4 ± 0 | 1 of 2 seeds | 0 of 2 seeds | 0.500 ± 0.000 "
        "| 0.500 ± 0.000 | -9.00 ± 0.00 |"
    )
