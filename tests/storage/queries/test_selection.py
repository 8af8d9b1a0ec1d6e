"""Which trajectories could be drawn and which were drawn, and whether draws are biased."""

import math
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import pytest

import storage
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.runs.run import Run
from tests.support.storage.choosing import (
    EVERY,
    LONGEST,
    ONLY_SHORT,
    SLOTS,
    SYNCS,
    choosing_buffer,
    few_contents,
    make_choosing_run,
)
from tests.support.storage.choosing import RESPONSES as K
from tests.support.storage.indexes import drawable, make_eligibility
from tests.support.storage.synthetic import STEPS, B, make_live_run, make_run
from tests.support.storage.synthetic import K as SYNTHETIC_K
from tests.support.storage.views import rows

MEASURES = ("age", "finished", "length", "reward")
SETS = ("generated", "eligible", "trained", "drawn")


@pytest.fixture(scope="module")
def fair(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    return storage.connect(make_choosing_run(str(tmp_path_factory.mktemp("root"))))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    """Connect to a run that never draws long responses."""
    return storage.connect(make_choosing_run(str(tmp_path_factory.mktemp("root")), sampler_sql=ONLY_SHORT))


@pytest.fixture(
    scope="module",
    params=[
        ("oldest", "newest", None),
        ("worst", "newest", None),
        ("oldest", "all", None),
        ("worst", "all", None),
        ("oldest", "newest", 5),
        ("oldest", "all", 4),
    ],
)
def crowded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[duckdb.DuckDBPyConnection, list[list[str]]]:
    """Return a run with many copies and little capacity, and the ids in its replay buffer after each sync."""
    held: list[list[str]] = []

    def remember(sync: int, buffer: DuckReplayBuffer) -> None:
        held.append(drawable(buffer.index))

    root = str(tmp_path_factory.mktemp("root"))
    evict, copies, max_age = request.param
    rule = {"evict": evict, "copies": copies, "max_age": max_age, "behind": 2}
    run = make_choosing_run(root, capacity=3, respond=few_contents, after=remember, **rule)
    return storage.connect(run), held


# --- what could be drawn ----------------------------------------------------------------------------------------------


def test_eligible_at_a_sync_is_what_the_replay_buffer_held_then(
    crowded: tuple[duckdb.DuckDBPyConnection, list[list[str]]],
):
    con, held = crowded
    assert len(held[-1]) < rows(con, "select count(*) from trajectories")[0][0] / 5
    for sync, ids in enumerate(held):
        assert {id for (id,) in rows(con, f"select trajectory_id from eligible_at({sync})")} == set(ids)


def test_eligible_is_what_some_step_could_draw(crowded: tuple[duckdb.DuckDBPyConnection, list[list[str]]]):
    con, held = crowded
    before_a_step = {id for ids in held[:-1] for id in ids}  # no step follows the last sync
    assert {id for (id,) in rows(con, "select trajectory_id from selection where eligible")} == before_a_step


def test_what_is_trained_was_eligible_and_every_draw_counts(
    crowded: tuple[duckdb.DuckDBPyConnection, list[list[str]]],
):
    con, _ = crowded
    assert rows(con, "select sum(draws), count(*) filter (draws > 0 and not eligible) from selection") == [
        (SYNCS * EVERY * SLOTS * K, 0)
    ]


def test_draws_of_abandoned_attempts_do_not_count_and_the_others_know_their_steps(tmp_path: Path):
    con = storage.connect(make_run(str(tmp_path)))
    assert rows(con, "select sum(draws), min(first_step), max(last_step) from selection") == [
        (STEPS * B * SYNTHETIC_K, 1, STEPS)
    ]
    mistaken = """
        select s.trajectory_id from selection s join draws d using (trajectory_id) group by all
        having s.draws <> count(*) or s.first_step <> min(d.step) or s.age_drawn <> avg(d.age)
    """
    assert rows(con, mistaken) == []


def test_what_waits_and_what_entered_last_is_not_eligible(tmp_path: Path):
    con = storage.connect(make_live_run(str(tmp_path)))  # after step 4 and the record of sync 3
    entered = "select max(step) filter (eligible), max(step) from selection"
    assert rows(con, entered) == [(2, 6)]


def test_prompts_are_drawn_within_the_bounds_that_sql_finds_and_all_of_a_branch_where_there_is_none(tmp_path: Path):
    low, high = 0.3, 0.45
    drawing = {"capacity": 6, "mean_reward_between": (low, high)}
    run = make_choosing_run(str(tmp_path), respond=few_contents, **drawing)
    con = storage.connect(run)
    for sync in range(SYNCS):
        held = f"""
            select prompt_id, max(sync) = {sync} as recent, avg(reward) as mean from eligible_at({sync})
            group by prompt_id
        """
        means = {prompt_id: (recent, mean) for prompt_id, recent, mean in rows(con, held)}
        drawn = rows(con, f"select distinct branch, prompt_id from draws where sync = {sync + 1}")
        for branch in ("recent", "prioritised"):
            among = {it: mean for it, (recent, mean) in means.items() if recent or branch == "prioritised"}
            within = {it for it, mean in among.items() if low < mean < high}
            assert len(within) < len(among)
            assert {prompt_id for it, prompt_id in drawn if it == branch} <= (within or set(among))


def test_a_buffer_that_is_built_again_draws_the_same_within_bounds(tmp_path: Path):
    queues: list[dict] = []

    def remember(sync: int, buffer: DuckReplayBuffer) -> None:
        queues.append(buffer.queues())

    bounds = (0.3, 0.45)
    run = make_choosing_run(str(tmp_path), respond=few_contents, after=remember, capacity=6, mean_reward_between=bounds)
    taken = "select step, slot, position, trajectory_id from draws where step > 10 order by all"
    again = choosing_buffer(run, 0, "", 1, eligibility=make_eligibility(6), mean_reward_between=bounds)
    again.replay(5)
    again.restore(queues[5])
    draws = []
    for sync in range(6, SYNCS + 1):
        draws += [draw for step in (2 * sync - 1, 2 * sync) for draw in again.draw(step)]
        again.replay(sync)
    assert [(it.step, it.slot, it.position, it.trajectory_id) for it in draws] == rows(storage.connect(run), taken)


# --- is the choice biased ---------------------------------------------------------------------------------------------


def compared(con: duckdb.DuckDBPyConnection, measure: str) -> dict[str, tuple[float, float, float]]:
    """Return mean, difference and standard errors by set."""
    query = "select set, mean, difference, standard_errors from compare_selection() where measure = ?"
    return {name: rest for name, *rest in con.execute(query, [measure]).fetchall()}


def test_a_sampler_that_never_draws_long_responses_shows(biased: duckdb.DuckDBPyConnection):
    length = compared(biased, "length")
    for name in ("trained", "drawn"):
        mean, difference, standard_errors = length[name]
        assert mean <= LONGEST / 2
        assert difference < -4
        assert standard_errors < -10
    query = "select draw_rate > 1, draws > 0, high <= 10 from selection_by('length')"
    assert set(rows(biased, query)) == {(True, True, True), (False, False, False)}


def test_and_shows_in_nothing_else(biased: duckdb.DuckDBPyConnection):
    assert abs(compared(biased, "reward")["drawn"][2]) < 4


@pytest.mark.parametrize("measure", ["reward", "length"])
def test_a_fair_choice_is_not_called_biased(measure: str, fair: duckdb.DuckDBPyConnection):
    for name in ("trained", "drawn"):
        assert abs(compared(fair, measure)[name][2]) < 4
    query = f"select max(abs(draw_rate - 1) / draw_rate_error) from selection_by('{measure}')"
    assert rows(fair, query)[0][0] < 4


def test_a_policy_that_changes_over_time_is_no_bias(tmp_path: Path):
    """Old responses are worse and have had more chances to be drawn. Among responses that entered together, draws are
    fair."""
    progress = iter(range(10**6))
    run = make_choosing_run(
        str(tmp_path), respond=lambda chance, n: ([chance.randrange(1 << 30)], float(next(progress)))
    )
    mean, difference, standard_errors = compared(storage.connect(run), "reward")["drawn"]
    assert mean < 0.9 * compared(storage.connect(run), "reward")["generated"][0]
    assert abs(standard_errors) < 4
    assert abs(difference) < 0.1 * mean


def test_differences_and_standard_errors_are_those_of_the_definition(biased: duckdb.DuckDBPyConnection):
    query = "select prompt_id, coalesce(sync, -1), length, eligible::int, (draws > 0)::int, draws from selection"
    prompt_B, sync_B, length_B, *weights = (np.array(column) for column in zip(*rows(biased, query), strict=True))
    for name, weight_B in zip(SETS[1:], weights, strict=True):
        deviation_B = np.zeros(len(length_B))
        for sync in set(sync_B):
            here_B = sync_B == sync
            centred_B = length_B[here_B] - length_B[here_B].mean()
            deviation_B[here_B] = (weight_B[here_B] - weight_B[here_B].mean()) * centred_B
        sums_P = np.array([deviation_B[prompt_B == prompt].sum() for prompt in sorted(set(prompt_B))])
        error = sums_P.std(ddof=1) * math.sqrt(len(sums_P))
        _, difference, standard_errors = compared(biased, "length")[name]
        assert difference == pytest.approx(sums_P.sum() / weight_B.sum(), abs=1e-9)
        if name != "eligible":  # all rows that have entered are eligible, so there is no chance
            assert standard_errors == pytest.approx(sums_P.sum() / error)


def test_means_and_quantiles_are_those_of_the_sets(fair: duckdb.DuckDBPyConnection):
    query = "select set, n, mean, std, median from compare_selection() where measure = 'length'"
    found = {name: rest for name, *rest in rows(fair, query)}
    lengths = {
        "generated": "select length from selection",
        "eligible": "select length from selection where eligible",
        "trained": "select length from selection where draws > 0",
        "drawn": "select length from draws join trajectories using (trajectory_id)",
    }
    for name, query in lengths.items():
        values = np.array(rows(fair, query), dtype=float)
        assert found[name] == pytest.approx([len(values), values.mean(), values.std(), np.median(values)])


def test_every_set_is_compared_by_every_measure_in_order(fair: duckdb.DuckDBPyConnection):
    assert rows(fair, "select measure, set from compare_selection()") == [(m, s) for m in MEASURES for s in SETS]
    assert [name for (name,) in rows(fair, "select set from prompts_by_set()")] == list(SETS)


@pytest.mark.parametrize("measure", MEASURES)
def test_bins_hold_every_response_once(measure: str, fair: duckdb.DuckDBPyConnection):
    bins = rows(fair, f"select low, high, generated, draws from selection_by('{measure}', 7)")
    assert all(low <= high for low, high, *_ in bins)
    assert all(before[1] < after[0] for before, after in pairwise(bins))
    assert len(bins) <= 7
    everything = f"select count({measure}), sum(draws) from selection"
    assert [(sum(it[2] for it in bins), sum(it[3] for it in bins))] == rows(fair, everything)


def test_a_measure_that_there_is_none_of_is_named(fair: duckdb.DuckDBPyConnection):
    with pytest.raises(duckdb.Error, match="not colour"):
        rows(fair, "from selection_by('colour')")


def test_prompts_are_counted_and_their_use_is_measured(biased: duckdb.DuckDBPyConnection):
    counts = np.array([n for (n,) in rows(biased, "select sum(draws)::int from selection group by prompt_id")])
    _, n, prompts, share, effective, gini = rows(biased, "from prompts_by_set() where set = 'drawn'")[0]
    assert (n, prompts, share) == (counts.sum(), (counts > 0).sum(), pytest.approx((counts > 0).sum() / 48))
    assert effective == pytest.approx(counts.sum() ** 2 / (counts**2).sum())
    gaps = np.abs(counts[:, None] - counts[None, :]).mean()
    assert gini == pytest.approx(gaps / (2 * counts.mean()))


def test_a_run_without_steps_has_nothing_selected(tmp_path: Path):
    con = storage.connect(Run.create(str(tmp_path), "empty", config={}, sampler_sql="", code_version=""))
    assert rows(con, "from compare_selection()") == rows(con, "from selection_by('length')") == []
    assert rows(con, "from prompts_by_set()") == rows(con, "from eligible_at(0)") == []
