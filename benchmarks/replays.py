"""Compare a run with its forks: a chart of their scores by step, and a table.

    python -m benchmarks.replays RUN FORK … [--metric greedy] [--out FILE.svg]

Each argument is a run, optionally followed by its name in the table: `tba-runs/runs/first="m = 0.5"`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import storage
from flows.pages.charts import Chart, Series

SCORES = "select step, value from evaluations where metric = $metric and not abandoned order by step"
LEARNED = """
select round(avg(t.reward), 3), round(avg(d.age), 1), count(distinct d.trajectory_id)
from draws d join trajectories t using (trajectory_id)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN[=NAME]")
    parser.add_argument("--metric", default="greedy")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    series: list[Series] = []
    print("| run | score | reward of what was drawn | mean age | distinct trajectories |\n|---|---|---|---|---|")
    for argument in options.runs:
        url, _, name = argument.partition("=")
        with storage.connect(url) as con:
            scores = con.execute(SCORES, {"metric": options.metric}).fetchall()
            learned = con.execute(LEARNED).fetchone() or ()
        series.append(Series(name or url.rpartition("/")[2], scores, marked=True))
        print("|", " | ".join(map(str, (series[-1].name, scores[-1][1] if scores else "", *learned))), "|")
    if options.out:
        options.out.write_text(Chart(f"{options.metric} score", series, x_name="step").picture())


if __name__ == "__main__":
    main()
