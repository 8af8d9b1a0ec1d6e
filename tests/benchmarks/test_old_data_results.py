"""The tables of a study: intervals in closed form, costs of a goal, and what is missing, failed or at an edge."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.harness.rows import append, read
from benchmarks.science.old_data import arms
from benchmarks.science.old_data.intervals import interval, t_quantile
from benchmarks.science.old_data.results import OURS, markdown, picture, steps_to

QUICKSTART, MANY = arms.STUDIES["quickstart"], arms.STUDIES["many-answers"]
OTHER = "RLOO, no penalty"
TUNED = {rung: 0.9 - 0.01 * (8 - rung) for rung in (3, 4, 5, 6, 7)}  # the best is the last rung of its ladder


def row(name: str, lag: int, seed: int, result: float, *, rung: int = 0, curve: str = "", failed: str = "") -> arms.Row:
    run = arms.make_run(name, lag, seed, (rung, 0))
    points = curve or f"128:0.4000 256:{result:.4f}"
    return arms.Row(**vars(run), result=result, measures="{}", curve=points, age=0.0, cpu_seconds=64.0, failed=failed)


@pytest.fixture
def rows(tmp_path: Path) -> list[arms.Row]:
    """Return the rows of a CSV: ours at lags 0, 64 and 256, and another arm at a lag of 64. The other arm's search at a
    lag of 256 has not ended."""
    made = [row(OURS, 64, seed, result) for seed, result in enumerate((0.95, 0.96, 0.97))]
    made += [row(OURS, 0, seed, result) for seed, result in enumerate((0.96, 0.96))]
    made += [row(OURS, 256, 5, 0.85, failed="no gradient")]
    made += [row(OTHER, 64, seed, score, rung=rung) for rung, score in TUNED.items() for seed in arms.TUNING_SEEDS]
    made += [row(OTHER, 64, 0, 0.85, rung=7), row(OTHER, 64, 1, 0.84, rung=7), row(OTHER, 64, 9, 0.5, rung=7)]
    made += [row(OTHER, 64, 2, 0.1, rung=3)]  # not the chosen setting
    made += [row(OTHER, 256, arms.TUNING_SEEDS[0], 0.8, rung=4)]
    for it in made:
        append(tmp_path / "rows.csv", it)
    return read(tmp_path / "rows.csv", arms.Row)


def table(study: arms.Study, rows: list[arms.Row], title: str) -> dict[tuple[str, str], str]:
    """Return the cells of a table by arm and lag."""
    lines = list(markdown(study, rows))
    begins = next(n for n, it in enumerate(lines) if n > lines.index(f"### {title}") and it.startswith("| "))
    head, _, *found = [[cell.strip() for cell in it.strip("|").split(" | ")] for it in _until_empty(lines[begins:])]
    return {(name, lag): cell for name, *cells in found for lag, cell in zip(head[1:], cells, strict=True)}


def _until_empty(lines: list[str]) -> list[str]:
    return lines[: lines.index("")] if "" in lines else lines


def test_quantiles_of_students_t_are_those_of_the_closed_forms_and_of_tables():
    for p in (0.6, 0.975, 0.9999):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)))
        assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))))
    assert t_quantile(0.975, 9) == pytest.approx(2.2622, abs=1e-4)
    assert t_quantile(0.995, 4) == pytest.approx(4.6041, abs=1e-4)
    assert t_quantile(0.975, 1000) == pytest.approx(1.9623, abs=1e-4)
    assert t_quantile(0.5, 3) == 0


def test_an_interval_of_several_comparisons_is_wider_and_one_value_has_none():
    alone, among = (interval([0.1, 0.3], level=0.95, comparisons=m) for m in (1, 5))
    assert alone == pytest.approx((0.2, 0.1 * math.tan(math.pi * 0.475)))
    assert among == pytest.approx((0.2, 0.1 * math.tan(math.pi * 0.495)))
    with pytest.raises(ValueError, match="got 1"):
        interval([0.1], level=0.95)


def test_differences_are_of_pairs_of_seeds_with_the_interval_of_all_comparisons(rows: list[arms.Row]):
    """Seeds 0 and 1 have both arms: leads of 0.10 and 0.12 at a lag of 64, the only comparison of the first table."""
    ahead = table(QUICKSTART, rows, "Ahead of every other arm")
    half = 0.01 * math.tan(math.pi * 0.475)
    assert ahead[OTHER, "lag 64"] == f"0.110 ± {half:.3f} (2 seeds)"
    assert ahead[OTHER, "lag 256"] == ahead[OTHER, "lag 0"] == "–"
    assert (OURS, "lag 64") not in ahead
    own = table(QUICKSTART, rows, "Against its own result on policy")
    assert own[OURS, "lag 64"] == f"-0.005 ± {0.005 * math.tan(math.pi * 0.475):.3f} (2 seeds)"
    assert own[OURS, "lag 256"] == "–"


def test_an_interval_without_zero_is_bold_and_more_comparisons_make_it_wider(rows: list[arms.Row]):
    rows = [*rows, row(OTHER, 64, 2, 0.86, rung=7)]  # leads of 0.10, 0.12 and 0.11
    error = 0.01 / math.sqrt(3)
    alone = table(QUICKSTART, rows, "Ahead of every other arm")[OTHER, "lag 64"]
    assert alone == f"**0.110 ± {error * t_quantile(0.975, 2):.3f}** (3 seeds)"
    at_0 = [row(OTHER, 0, seed, score, rung=rung) for rung, score in TUNED.items() for seed in arms.TUNING_SEEDS]
    at_0 += [row(OTHER, 0, seed, 0.5, rung=7) for seed in (0, 1)]
    among = table(QUICKSTART, [*rows, *at_0], "Ahead of every other arm")[OTHER, "lag 64"]
    assert among == f"**0.110 ± {error * t_quantile(1 - 0.025 / 2, 2):.3f}** (3 seeds)"
    far = [row(OTHER, 64, 3, 0.1, rung=7), row(OURS, 64, 3, 0.96)]
    assert not table(QUICKSTART, [*rows, *far], "Ahead of every other arm")[OTHER, "lag 64"].startswith("**")


def test_lower_total_variation_is_a_lead():
    made = [row(OURS, lag, seed, 0.01 if lag else 0.05) for lag in (0, 64) for seed in (0, 1)]
    assert table(MANY, made, "Against its own result on policy")[OURS, "lag 64"] == "**0.040 ± 0.000** (2 seeds)"


def test_results_say_how_many_seeds_they_have_and_how_many_failed(rows: list[arms.Row]):
    shown = table(QUICKSTART, rows, "Result by lag")
    assert shown[OURS, "lag 64"] == f"0.960 ± {0.01 / math.sqrt(3):.3f} (3 seeds)"
    assert shown[OURS, "lag 256"] == "0.850 (1 seed, 1 failed)"
    assert shown[OTHER, "lag 64"] == f"{mean((0.85, 0.84, 0.5)):.3f} ± 0.115 (3 seeds)"
    assert shown[OTHER, "lag 256"] == shown[OTHER, "lag 0"] == shown[OURS, "lag 1"] == "–"


def test_settings_say_what_lies_at_an_edge_what_is_searched_and_what_failed(rows: list[arms.Row]):
    shown = table(QUICKSTART, rows, "Chosen settings")
    assert shown[OTHER, "lag 64"] == "0.0024 edge"
    assert shown[OTHER, "lag 256"] == "searching, 1 runs"
    assert shown[OTHER, "lag 0"] == "–"
    assert shown[OURS, "lag 64"] == "0.0003"  # its ladder has no other value
    failing = [replace(it, failed="no gradient") if it.rate == 2.4e-3 and it.seed in (0, 101) else it for it in rows]
    assert table(QUICKSTART, failing, "Chosen settings")[OTHER, "lag 64"] == "0.0024 edge (1 of its runs failed)"


def test_the_page_names_what_is_missing(rows: list[arms.Row]):
    text = " ".join(it.strip() for it in markdown(QUICKSTART, rows))
    missing = text.partition("### Result by lag")[0]
    assert "; Proximal TB; Proximal TB, weighted; " in missing.partition("- *RLOO")[0]
    assert f"- *{OTHER}*: lag 64 (3 of 10 seeds); lag 256 (search not ended)" in missing
    assert f"- *{OURS}*: lag 0 (2 of 10 seeds); lag 64 (3 of 10 seeds); lag 256 (1 of 10 seeds)" in missing


def test_results_of_a_search_are_those_of_its_choice_and_an_arm_without_results_has_no_row(rows: list[arms.Row]):
    shown = table(QUICKSTART, rows, "Results on the seeds of the search")
    assert shown[OTHER, "lag 64"] == f"{TUNED[7]:.3f}" and shown[OTHER, "lag 256"] == "–"
    assert (OURS, "lag 64") not in shown  # it has no search
    searching = [it for it in rows if it.arm == OURS or it.lag == 256]
    assert (OTHER, "lag 256") not in table(QUICKSTART, searching, "Result by lag")
    assert table(QUICKSTART, searching, "Chosen settings")[OTHER, "lag 256"] == "searching, 1 runs"


def test_the_cost_of_a_goal_is_that_of_the_step_where_the_curve_crosses_it():
    assert steps_to("16:0.5000 32:0.8000 48:1.0000 64:0.8500", 0.9) == pytest.approx(40)
    assert steps_to("16:0.9500 32:0.8000", 0.9) == 16
    assert steps_to("16:0.5000 32:0.8999", 0.9) is None
    assert steps_to("", 0.9) is None
    assert steps_to("64:0.2000 128:0.0500", 0.1, -1) == pytest.approx(64 + 64 * 2 / 3)


def test_costs_are_medians_in_which_a_seed_that_does_not_arrive_is_infinite(rows: list[arms.Row]):
    """The curves of ours go from 0.4 at step 128 in a straight line to the result at step 256."""
    steps = 128 + 128 * 0.5 / 0.56  # the middle seed of three
    shown = table(QUICKSTART, rows, "Trajectories to 0.90")
    assert shown[OURS, "lag 64"] == f"{128 * steps:,.0f} (3 seeds)"
    assert shown[OURS, "lag 256"] == "not reached (0 of 1 seed reach it)"
    assert shown[OTHER, "lag 64"] == "not reached (0 of 3 seeds reach it)"
    seconds = table(QUICKSTART, rows, "CPU seconds to 0.90")
    assert seconds[OURS, "lag 64"] == f"{64 * steps / 256:,.0f} (3 seeds)"
    slow = [row(OURS, 64, seed, 0.5) for seed in (3, 4)]
    last = 128 + 128 * 0.5 / 0.55
    assert table(QUICKSTART, [*rows, *slow], "Trajectories to 0.90")[OURS, "lag 64"] == (
        f"{128 * last:,.0f} (3 of 5 seeds reach it)"
    )


def test_the_chart_has_a_line_for_each_arm_with_results_alone(rows: list[arms.Row]):
    drawn = picture(QUICKSTART, rows)
    assert f">{OURS}<" in drawn and ">PPO<" not in drawn
    assert picture(QUICKSTART, []) == ""
