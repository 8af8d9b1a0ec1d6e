"""Runs with one setting changed: each change is possible, all runs see the same responses, and rows become a table."""

import math

import pytest

from benchmarks.science.lagged import checked_lag
from benchmarks.science.old_data import one_change as study
from benchmarks.science.old_data.arms import STEPS, STUDIES

RUNS = [study.Run(factor=factor, value=value, seed=0) for factor, of in study.FACTORS.items() for value in of]


def row(run: study.Run, right: float, *, failed: str = "") -> study.Row:
    return study.Row(**vars(run), right=right, total_variation=0.1, answers=2, reward=0.5, age=3, failed=failed)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.factor} {run.value}")
def test_every_run_learns_from_and_generates_the_same_number_of_responses(run: study.Run):
    for task in STUDIES.values():
        config = run.config(task)
        checked_lag(config)
        search, training, every = config.search, config.training, config.sync.every
        assert training.prompts_per_step * training.responses_per_prompt == study.BATCH
        assert search.prompts_per_round * search.responses_per_prompt == study.BATCH * every
        assert STEPS % every == STEPS // 2 % every == 0


def test_each_change_changes_the_settings_and_no_two_are_the_same():
    configs = [run.config(STUDIES["quickstart"]).to_dict() for run in RUNS]
    assert all(configs[i] not in configs[:i] for i in range(1, len(configs)))


def test_rows_become_a_table_without_failed_runs_and_charts():
    rows = [row(run, 0.5 + i / 100) for i, run in enumerate(RUNS)]
    rows.append(row(study.Run(factor=study.AS_IT_WAS, value="", seed=1), math.nan, failed="no gradient"))
    table = list(study.markdown(rows))
    assert table[2] == "| as it was |  | 1 | 0.500 | 0.100 | 2.0 | 0.500 | 3.0 |" and len(table) == 2 + len(RUNS)
    for picture in study.PICTURES.values():
        assert ">probability of a right answer<" in study.by_value(rows, *picture)
        assert study.by_value(rows[:1], *picture) == ""
