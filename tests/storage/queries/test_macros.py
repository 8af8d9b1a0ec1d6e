"""Macros answer the usual questions about a run; their results are compared with the views."""

import json
from itertools import combinations
from pathlib import Path

import duckdb
import numpy as np
import pytest

import storage
from storage.log.prompts import write_prompts
from storage.log.trajectories import Trajectories
from storage.maintenance.compactor import compact
from storage.runs.run import Run
from tests.support.builders import make_prompt, make_shard
from tests.support.storage.choosing import few_contents, make_choosing_run
from tests.support.storage.indexes import make_eligibility
from tests.support.storage.synthetic import EVERY, STEPS, B, K, S, make_run
from tests.support.storage.views import rows


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    return storage.connect(make_run(str(tmp_path_factory.mktemp("root"))))


def test_what_a_step_learned_from(con: duckdb.DuckDBPyConnection):
    found = rows(con, "select slot, position, trajectory_id, reward, response from learned_from(5)")
    assert len(found) == B * K
    assert [it[:3] for it in found] == rows(
        con, "select slot, position, trajectory_id from draws where step = 5 order by slot, position"
    )
    assert all(reward in (0.0, 1.0) and response == "3" for *_, reward, response in found)


def test_a_trajectory_knows_every_step_that_drew_it(con: duckdb.DuckDBPyConnection):
    for id, steps in rows(con, "select trajectory_id, list(step order by step) from draws group by 1"):
        found = rows(con, f"select trajectory_id, draws, drawn_at, len(residuals), answer from trajectory('{id}')")
        assert found == [(id, len(steps), steps, len(steps), "3")]
    never = rows(con, "select trajectory_id from trajectories anti join draws using (trajectory_id) limit 1")[0][0]
    assert rows(con, f"select draws, len(residuals) from trajectory('{never}')") == [(0, 0)]


def test_a_test_prompt_of_the_same_name_is_no_answer(tmp_path: Path):
    run = Run.create(str(tmp_path), "first", config={}, sampler_sql="", code_version="")
    write_prompts(run, "train", [make_prompt("0")])
    write_prompts(run, "test", [make_prompt("0", text="another", answer="9")])
    Trajectories(run).append(0, 0, make_shard({"0": [0.0, 0.0]}))
    con = storage.connect(run)
    text, answer = rows(con, "select text, answer from prompts where split = 'train'")[0]
    assert rows(con, "select text, tries from cost_per_solved()") == [(text, 2)]
    assert rows(con, "select text, answer, tries from unsolved()") == [(text, answer, 2)]
    assert rows(con, "select answer from trajectory('0/0/0')") == [(answer,)]


def test_the_group_of_a_trajectory_has_all_its_responses(con: duckdb.DuckDBPyConnection):
    id, group_id = rows(con, "select trajectory_id, group_id from trajectories where searcher = 1 and round = 2")[0]
    found = [it for (it,) in rows(con, f"select trajectory_id from group_of('{id}')")]
    assert id in found
    assert len(found) == S
    assert {it for (it,) in rows(con, f"select trajectory_id from trajectories where group_id = '{group_id}'")} == set(
        found
    )


def test_unsolved_prompts_are_those_without_the_reward(tmp_path: Path):
    run = Run.create(str(tmp_path), "first", config={}, sampler_sql="", code_version="")
    rewards = {"never": [0.0, 0.0, 0.0], "half": [0.5], "once": [0.0, 1.0], "always": [1.0]}
    Trajectories(run).append(0, 0, make_shard(rewards))
    con = storage.connect(run)
    query = "select prompt_id, tries, reward_max, distinct_responses from unsolved({})"
    assert rows(con, query.format("")) == [("never", 3, 0.0, 3), ("half", 1, 0.5, 1)]
    assert rows(con, query.format("min_tries := 2")) == [("never", 3, 0.0, 3)]
    assert rows(con, query.format("solved_at := 0.5")) == [("never", 3, 0.0, 3)]


def test_what_a_solved_prompt_has_cost(con: duckdb.DuckDBPyConnection):
    found = rows(con, "select prompt_id, tries, solved, tokens, tokens_per_solved from cost_per_solved()")
    expected = "select prompt_id, count(*), sum(reward), sum(length) from trajectories group by 1 order by 1"
    assert sorted(it[:4] for it in found) == rows(con, expected)
    assert all(cost == (tokens / solved if solved else None) for *_, solved, tokens, cost in found)
    costs = [float("inf") if it[4] is None else it[4] for it in found]
    assert costs == sorted(costs, reverse=True)


def test_duplicates_are_contents_that_came_more_than_once(tmp_path: Path):
    run = make_choosing_run(str(tmp_path), respond=few_contents)
    con = storage.connect(run)
    contents = "select count(*), sum(n) from (select count(*) as n from trajectories group by content_hash) where n >= "
    for copies in (2, 9):
        assert rows(con, f"select count(*), sum(copies) from duplicates({copies})") == rows(con, contents + str(copies))


def test_there_are_no_duplicates_where_all_differ(con: duckdb.DuckDBPyConnection):
    assert rows(con, "from duplicates()") == []


def test_versions_are_compared_in_standard_errors(con: duckdb.DuckDBPyConnection):
    query = "select version, value, error, gain, change_in_errors from compare_versions('greedy')"
    before, half, last = rows(con, query)  # scores 0.25, 0.5 and 0.75, with n = 100
    assert before == (0, 0.25, pytest.approx((0.25 * 0.75 / 100) ** 0.5), 0.0, None)
    assert half[3:] == (0.25, pytest.approx(0.25 / (0.25 * 0.75 / 100 + 0.5 * 0.5 / 100) ** 0.5))
    assert last[3] == 0.5
    assert rows(con, "from compare_versions('nothing')") == []


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_k_responses_with_a_right_one(k: int, con: duckdb.DuckDBPyConnection):
    query = "select version_start, list(reward) from trajectories group by version_start, group_id"
    shares: dict[int, list[float]] = {}
    for version, rewards in rows(con, query):
        chosen = [max(some) for some in combinations(rewards, k)]
        shares.setdefault(version, []).append(sum(chosen) / len(chosen))
    assert rows(con, f"select version_start, groups, pass_at_k from pass_at({k})") == [
        (version, len(of), pytest.approx(sum(of) / len(of))) for version, of in sorted(shares.items())
    ]


def test_pass_at_k_leaves_out_groups_with_fewer_responses(con: duckdb.DuckDBPyConnection):
    assert rows(con, f"from pass_at({S + 1})") == []


def test_ages_cover_every_draw(con: duckdb.DuckDBPyConnection):
    draws, mean = rows(con, "select sum(draws), sum(draws * reward_mean) / sum(draws) from reward_by_age(3)")[0]
    assert draws == STEPS * B * K
    expected = rows(con, "select avg(reward) from draws join trajectories using (trajectory_id)")[0][0]
    assert mean == pytest.approx(expected)
    assert all(age % 3 == 0 for (age,) in rows(con, "select age_from from reward_by_age(3)"))


def test_what_a_bound_on_age_has_cost_is_counted_by_sync(tmp_path: Path):
    con = storage.connect(make_choosing_run(str(tmp_path), respond=few_contents, max_age=5, behind=2))
    entered = rows(con, "select sync, step, age, length, draws, eligible from selection order by sync")
    last = max(step for _, step, *_ in entered)
    found = rows(con, "select sync, responses, late, undrawn, lost_share, lost_tokens from outdated()")
    for sync, responses, late, undrawn, share, tokens in found:
        of_sync = [row for row in entered if row[0] == sync]
        old = [row for row in of_sync if row[2] > 5]
        left = [row for row in of_sync if row[2] <= 5 and row[5] and not row[4] and row[2] + last - row[1] > 5]
        lost = len(old) + len(left)
        assert (responses, late, undrawn) == (len(of_sync), len(old), len(left))
        assert share == pytest.approx(lost / responses) and tokens == sum(row[3] for row in [*old, *left])
    late, undrawn = (sum(row[n] for row in found) for n in (2, 3))
    assert late and undrawn
    assert rows(con, "select count(*), sum(draws) from selection where age > 5") == [(late, 0)]
    assert rows(con, "select max(age) from draws")[0][0] <= 5
    assert rows(con, "select sum(late) from outdated(1000)") == [(0,)]
    unbounded = storage.connect(make_choosing_run(str(tmp_path / "unbounded"), respond=few_contents, behind=2))
    assert rows(unbounded, "select sum(late + undrawn) from outdated()") == [(0,)]
    assert rows(unbounded, "select sum(late) from outdated(5)") == [(late,)]


def test_stale_draws_are_counted_by_step(con: duckdb.DuckDBPyConnection):
    assert rows(con, "select step, stale, stale_share * draws from stale(2)") == rows(
        con, "select step, count(*) filter (age > 2), count(*) filter (age > 2) from draws group by 1 order by 1"
    )


def test_drift_is_the_trainers_log_probability_minus_the_searchers(tmp_path: Path):
    """In this run, the trainer's log-probability of each response is 0, and the searchers' is -0.5 per token."""
    con = storage.connect(make_choosing_run(str(tmp_path)))
    lengths = np.array(rows(con, "select length from draws join trajectories using (trajectory_id)"), dtype=float)
    draws, mean, greatest, of_token, share = rows(
        con, "select draws, drift_mean, drift_max, drift_per_token, effective_share from drift(1000)"
    )[0]
    weights = np.exp(lengths / 2)
    assert (draws, mean, greatest) == (len(lengths), pytest.approx(lengths.mean() / 2), lengths.max() / 2)
    assert of_token == pytest.approx(0.5)
    assert share == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def test_how_far_the_policy_is_from_the_reference(tmp_path: Path):
    run = make_run(str(tmp_path))
    con = storage.connect(run)
    query = "select version_start, list_sum(behaviour_logps) - list_sum(ref_logps), length from trajectories"
    gaps: dict[int, list] = {}
    for version, gap, length in rows(con, query):
        gaps.setdefault(version, []).append((gap, length))
    for version, responses, left_out, kl, error, per_token in rows(con, "from from_reference()"):
        own, lengths = np.array(gaps.pop(version)).T
        assert (responses, left_out) == (len(own), 0)
        assert (kl, per_token) == pytest.approx((own.mean(), own.sum() / lengths.sum()))
        assert error == pytest.approx(own.std(ddof=1) / len(own) ** 0.5)
    assert not gaps
    compact(run, keep_checkpoints=1, drop_beyond=make_eligibility(2))
    [(responses, left_out)] = rows(storage.connect(run), "select sum(responses), sum(left_out) from from_reference()")
    [(given_up, all)] = rows(
        storage.connect(run), "select count(*) filter (ref_logps is null), count(*) from trajectories"
    )
    assert (left_out, responses) == (given_up, all - given_up) and given_up > 0


def test_drift_leaves_out_what_was_given_up(tmp_path: Path):
    run = make_run(str(tmp_path))
    compact(run, keep_checkpoints=1, drop_beyond=make_eligibility(2))
    con = storage.connect(run)
    kept = "from draws d join trajectories t using (trajectory_id) where behaviour_logps is not null"
    drifts = [drift for (drift,) in rows(con, f"select d.logp - list_sum(behaviour_logps) {kept}")]
    [(draws, mean, share)] = rows(con, "select draws, drift_mean, effective_share from drift(1000)")
    assert 0 < draws == len(drifts) < rows(con, "select count(*) from draws")[0][0]
    weights = np.exp(drifts)
    assert (mean, share) == pytest.approx((np.mean(drifts), weights.sum() ** 2 / (draws * (weights**2).sum())))


def test_help_tells_every_column_of_a_view(con: duckdb.DuckDBPyConnection):
    described = rows(con, "select column_name, lower(column_type) from (describe draws)")
    told = rows(con, "select name, type from help('draws') where type <> 'view'")
    assert told == described


def test_help_about_nothing_known_says_so(con: duckdb.DuckDBPyConnection):
    with pytest.raises(duckdb.Error, match="there is no view and no macro nonsense"):
        rows(con, "from help('nonsense')")


def test_help_tells_the_parameters_of_a_macro(con: duckdb.DuckDBPyConnection):
    told = rows(con, "select name, type from help('unsolved') where type in ('macro', 'parameter')")
    assert told == [
        ("unsolved(min_tries, solved_at)", "macro"), ("min_tries", "parameter"), ("solved_at", "parameter")
    ]  # fmt: skip


def test_the_step_of_a_sync_is_every_times_its_number(con: duckdb.DuckDBPyConnection):
    every = json.loads(rows(con, "select value from settings where name = 'sync.every'")[0][0])
    assert every == EVERY
    assert rows(con, f"from syncs where step <> sync * {every}") == []
