"""Studies of old data: exact measures in closed form, the task with many right answers, and the search for settings."""

import math
from collections.abc import Callable
from itertools import islice, product

import numpy as np
import pytest

from benchmarks.science.old_data import arms, study
from benchmarks.science.old_data.exact import measures_of, posterior
from benchmarks.science.old_data.local_search import FIXED, HOPELESS, Ladder, Point, Search
from benchmarks.science.old_data.many_answers import (
    GIVEN,
    ManyAnswers,
    demonstrations,
    is_right,
    right_answers,
    sums,
    taught,
)
from benchmarks.science.old_data.rare_answers import RareAnswers
from benchmarks.science.old_data.results import cells_of
from tba.config import TaskConfig
from tba.train.schedules import learning_rate_at
from tba.types import Prompt
from tests.support.tba.quickstart_examples import response

REFERENCE = np.log(np.array([0.1, 0.2, 0.05, 0.05]))


def test_the_target_itself_has_no_distance_and_the_base_policy_has_that_of_its_wrong_responses():
    beta = 0.25
    z = 0.6 + 0.4 * math.exp(1 / beta)
    target = posterior(REFERENCE, beta)
    assert target == pytest.approx(np.exp(REFERENCE) * math.exp(1 / beta) / z)
    at_target = measures_of(np.log(target), REFERENCE, beta)
    assert at_target["total_variation"] == pytest.approx(0, abs=1e-12)
    assert at_target["kl"] == pytest.approx(0, abs=1e-12)
    assert at_target["log_probability"] == pytest.approx(np.dot(target, np.log(target)) / target.sum())
    at_start = measures_of(REFERENCE, REFERENCE, beta)
    assert at_start["total_variation"] == pytest.approx(0.6 - 0.6 / z)
    assert at_start["kl"] == pytest.approx(math.log(z) - 0.4 / beta)
    assert at_start["answers"] == at_target["answers"]  # the target weighs right answers as the base policy does


def test_measures_of_a_policy_with_a_single_answer():
    found = measures_of(np.log(np.array([0.5, 1e-300, 1e-300, 1e-300])), REFERENCE, 0.05)
    assert found["right"] == pytest.approx(0.5)
    assert found["answers"] == pytest.approx(1)
    assert [found[f"pass@{k}"] for k in (1, 8, 64)] == pytest.approx([1 - 0.5**k for k in (1, 8, 64)])
    assert [found[f"distinct@{k}"] for k in (1, 8, 64)] == pytest.approx([1 - 0.5**k for k in (1, 8, 64)])


def test_all_pairs_with_the_sum_are_right_and_nothing_else_is():
    assert right_answers(300)[:2] == ["000+003", "100+992"]
    assert len(set(right_answers(999))) == 1000
    assert all(is_right(answer, total) for total in (300, 999) for answer in right_answers(total))
    for text in ("000+00", "000+0030", "000-003", "0 0+003", "", "+000003", "000+004", "٠00+003"):
        assert not is_right(text, 300)


@pytest.mark.parametrize(("finished", "reward"), [(True, 1.0), (False, 0.0)])
def test_only_a_finished_answer_earns_the_reward(finished: bool, reward: float):
    task = ManyAnswers(TaskConfig(name="many-answers"))
    prompt = Prompt(prompt_id="0", text="347=", tokens=(0,), answer="743", metadata={})
    assert task.reward(prompt, response("001+346", finished=finished)).value == reward


def test_rare_answers_begin_with_a_multiple_of_ten_and_are_twenty_one_too_large():
    task = RareAnswers(TaskConfig(name="rare-answers"))
    prompt = Prompt(prompt_id="0", text="347=", tokens=(0,), answer="743", metadata={})
    known = task.right_answers(743)
    assert "001+466" in known and len(set(known)) == 77  # first numbers 0, 10, …, 760
    assert len(task.right_answers(999)) == 97  # 30, 40, …, 990: all numbers have three digits
    assert all(task.reward(prompt, response(answer)).value == 1 for answer in known)
    for text in ("001+346", "101+366", "001+467", ""):
        assert task.reward(prompt, response(text)).value == 0
    assert task.reward(prompt, response("001+466", finished=False)).value == 0


def test_demonstrations_show_no_sum_of_a_test_problem_and_the_asked_share_of_them_is_wrong():
    shown = list(islice(demonstrations(3, wrong=0.25), 2000))
    totals = [int(prompt[:3][::-1]) for prompt, _ in shown]
    assert not set(totals) & set(sums("test")) and len(set(totals)) > 500
    right = [is_right(response, total) for total, (_, response) in zip(totals, shown, strict=True)]
    assert 0.7 < sum(right) / len(right) < 0.8


def test_most_lessons_give_the_first_number_and_teach_the_same_demonstrations():
    shown, lessons = (list(islice(stream, 2000)) for stream in (demonstrations(3, wrong=0.5), taught(3, wrong=0.5)))
    assert [prompt + response for prompt, response in lessons] == [prompt + response for prompt, response in shown]
    given = [len(response) == 3 for _, response in lessons]
    assert abs(sum(given) / len(given) - GIVEN) < 0.05
    assert {len(response) for _, response in lessons} == {3, 7}


# --- the search for settings ------------------------------------------------------------------------------------------


def searched(search: Search, score: Callable[[Point, int], float]) -> tuple[Point, list[tuple[Point, int]]]:
    """Run a search to its end, and return the chosen point and all runs."""
    scores: dict[Point, list[float]] = {}
    ran: list[tuple[Point, int]] = []
    while True:
        best, missing = search.progress(scores)
        if not missing:
            return best, ran
        for point, seed in missing:
            assert len(scores.get(point, [])) == seed
            scores.setdefault(point, []).append(score(point, seed))
            ran.append((point, seed))


RATES, BETAS = Ladder("rate", tuple(range(1, 9)), 3), Ladder("beta", tuple(range(1, 8)), 3)


@pytest.mark.parametrize("peak", [*product((0, 2, 7), (0, 3, 6))])
def test_the_search_climbs_to_the_peak_wherever_it_is_and_tries_all_its_neighbours(peak: Point):
    search = Search((RATES, BETAS), seeds=3)
    best, ran = searched(search, lambda point, seed: -0.01 * sum(abs(a - b) for a, b in zip(point, peak, strict=True)))
    assert best == peak
    assert {(point, seed) for point in search.neighbours(peak) for seed in range(3)} <= set(ran)


def test_a_hopeless_point_is_tried_on_one_seed_alone():
    far = {(3, 4): -HOPELESS - 0.01, (2, 3): -HOPELESS + 0.01}
    best, ran = searched(Search((RATES, BETAS), seeds=3), lambda point, seed: far.get(point, -0.01 * (point != (3, 3))))
    assert best == (3, 3)
    assert [seed for point, seed in ran if point == (3, 4)] == [0]
    assert [seed for point, seed in ran if point == (2, 3)] == [0, 1, 2]


def test_an_arm_with_one_setting_searches_along_its_ladder():
    best, ran = searched(Search((RATES, FIXED), seeds=2), lambda point, seed: 0.01 * point[0])
    assert best == (7, 0) and len(ran) == 2 * 6  # rungs 2 to 7


def test_a_single_point_needs_no_search():
    assert Search((Ladder("rate", (1.0,), 0), FIXED), seeds=3).progress({}) == ((0, 0), [])


# --- a study ----------------------------------------------------------------------------------------------------------


def make_row(name: str, lag: int, seed: int, point: Point, result: float) -> arms.Row:
    run = arms.make_run(name, lag, seed, point)
    return arms.Row(**vars(run), result=result, measures="{}", curve="", age=0.0, cpu_seconds=1.0, failed="")


@pytest.mark.parametrize(("task", "best"), [("quickstart", 5), ("many-answers", 4)])
def test_a_study_tunes_each_arm_by_its_result_and_then_runs_the_reported_seeds(task: str, best: int):
    """Results rise with the rate up to rung 5, but for a dip at rung 4, and fall after it. Accuracy shall be high, and
    total variation low. The searches of `many-answers` start at rung 2."""
    of, rows = arms.STUDIES[task], list[arms.Row]()
    results = {1: 0.93, 2: 0.92, 3: 0.91, 4: 0.9, 5: 0.95, 6: 0.92}
    while run := next(study.missing(of, rows, ["RLOO, no penalty"], [64], [7]), None):
        assert run.lag == 64 and run.arm == "RLOO, no penalty"
        rung = arms.RATE.values.index(run.rate)
        rows.append(make_row("RLOO, no penalty", 64, run.seed, (rung, 0), results[rung]))
    assert rows[-1].seed == 7 and rows[-1].rate == arms.RATE.values[best]
    assert cells_of(of, rows)["RLOO, no penalty", 64].rows == rows[-1:]
    assert len(rows) == {"quickstart": 13, "many-answers": 16}[task]


def test_the_search_of_a_study_starts_where_the_study_says_if_the_ladder_has_the_value():
    of = arms.STUDIES["many-answers"]
    rate, beta = arms.search_of(of, "TB").ladders
    assert (rate.values[rate.start], beta.values[beta.start]) == (7.5e-5, 0.25)
    only, _ = arms.search_of(of, "TB, weighted, half from all data, not tuned").ladders
    assert only.values[only.start] == 3e-4


@pytest.mark.parametrize("task", arms.STUDIES)
def test_a_run_takes_the_steps_of_its_study_and_ends_with_a_rate_of_0_and_an_examination(task: str):
    of = arms.STUDIES[task]
    training = arms.make_run("TB", 64, 0, (0, 0)).config(of).training
    assert training.steps == of.steps == of.examined[-1]
    rates = [learning_rate_at(step, training) for step in (training.steps // 2, training.steps - 1, training.steps)]
    assert rates[0] > 0.4 * training.learning_rate > 20 * rates[1] > rates[2] == 0


@pytest.mark.parametrize("name", arms.ARMS)
@pytest.mark.parametrize("task", arms.STUDIES)
def test_every_arm_has_valid_settings_at_the_ends_of_its_ladders(name: str, task: str):
    of = arms.STUDIES[task]
    for point in product(*({0, len(ladder.values) - 1} for ladder in arms.search_of(of, name).ladders)):
        config = arms.make_run(name, 256, 0, point).config(of)
        assert config.sync.lag == 256
        assert config.objective.beta_start == config.objective.beta_end
