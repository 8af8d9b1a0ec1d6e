"""The table of the policies to which objectives lead: each objective can be measured, and the page shows the rows."""

from pathlib import Path

import pytest

from benchmarks.science.convergence import OBJECTIVES, lead, loss_of, markdown, read
from tba import objectives

DOCS = Path(__file__).parents[2] / "docs"


def test_every_objective_has_a_row():
    assert {it.get("name", "trajectory-balance") for it in OBJECTIVES.values()} == set(objectives.OBJECTIVES)


def test_the_page_shows_the_rows_that_were_measured():
    assert "\n".join(markdown(read(DOCS / "results/convergence.csv"))) in (DOCS / "objectives.md").read_text()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_can_be_measured(name: str):
    before, after, reward = lead(loss_of(name), "reference", seed=0, steps=3)
    assert 0 < after != before and 0 < reward < 1


def test_trajectory_balance_reaches_the_target_from_uniform_data():
    assert lead(loss_of("trajectory balance"), "uniform", seed=0, steps=4000)[1] < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("name", ["RLOO, no penalty", "Dr. GRPO with k3, no ratio", "Kimi k1.5"])
def test_uncorrected_methods_do_not_reach_the_target_from_uniform_data(name: str):
    assert lead(loss_of(name), "uniform", seed=0, steps=4000)[1] > 0.05
