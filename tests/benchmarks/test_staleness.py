"""The staleness curve: which settings its sweeps choose, and that the page shows the measured rows."""

from pathlib import Path

from benchmarks.harness.rows import read
from benchmarks.science import staleness

RESULTS = Path(__file__).parents[2] / "docs/results"


def test_the_page_shows_the_rows_that_were_measured():
    rows = read(RESULTS / "staleness.csv", staleness.Row)
    assert set(staleness.markdown(rows)) - set((RESULTS / "README.md").read_text().splitlines()) == set()


def row(rate: float, beta: float, sampled: float) -> staleness.Row:
    run = staleness.make_run("TB", 16, staleness.TUNING_SEED, rate, beta)
    return staleness.Row(
        **vars(run), sampled=sampled, greedy=0.0, reward=0.0, age=16.0, curve="", cpu_seconds=1.0, failed=""
    )


def test_a_whole_sweep_chooses_the_best_and_among_equals_the_smaller_rate_then_the_smaller_beta():
    scores = [(6e-4, 0.25, 0.6), (6e-4, 0.05, 0.7), (3e-4, 0.25, 0.7), (3e-4, 0.05, 0.7), (1.5e-4, 0.25, 0.5)]
    rows = [row(*it) for it in [*scores, (1.5e-4, 0.05, 0.6)]]
    assert [run.beta for run in staleness.sweep("TB", 16)] == [0.05, 0.25] * 3
    assert staleness.next_run(rows[:-1], ["TB"], [4], [0]) == staleness.sweep("TB", 16)[0]
    best = staleness.chosen(rows, "TB", 4)
    assert (best.rate, best.beta) == (3e-4, 0.05)
    assert staleness.next_run(rows, ["TB"], [4], [0]) == staleness.make_run("TB", 4, 0, 3e-4, 0.05)
