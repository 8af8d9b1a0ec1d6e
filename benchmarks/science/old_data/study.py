"""Studies of objectives by the age of their data. Every arm is tuned at every lag, in the same way, except for one arm
that has the same setting at all lags.

    python -m benchmarks.science.old_data.study TASK [--only ARM …] [--lags 64 …] [--seeds 0 …] [--jobs N] [--hours H]
    python -m benchmarks.science.old_data.study TASK --show        only show the tables and chart of stored results

TASK is `quickstart` or `many-answers`. Each run takes the steps of its study (`STUDIES`) on 16 prompts with 8 responses
each. The lag is exact (benchmarks/science/lagged.py). A lag of 0 is on policy, and at a lag of 256 the base policy
generates all responses of the 256 steps of `quickstart`, and those of the first quarter of `many-answers`. Each seed
has its own base policy.

A local search (`local_search.py`) chooses the learning rate of each arm and a further setting, such as beta, if the arm
has one, at each lag, on `TUNING_SEEDS`. The chosen setting then runs on other seeds. The search looks for the best
result after the last step. For `quickstart` the result is accuracy: the mean probability of the right answer to
held-out problems. For `many-answers` it is the total variation to the exact target at `BETA`. Both are exact: no
response is sampled.

Each finished run is a row of the CSV and is not repeated, so the command continues where it stopped.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.harness.rows import append, read
from benchmarks.harness.side_by_side import run_all
from benchmarks.science.lagged import Scored, lagged_run
from benchmarks.science.old_data.arms import (
    ARMS,
    BETA,
    LAGS,
    SEEDS,
    STUDIES,
    TUNING_SEEDS,
    Row,
    Run,
    Study,
    make_run,
    progress,
)
from benchmarks.science.old_data.exact import examine_of
from benchmarks.science.old_data.local_search import Point
from benchmarks.science.old_data.results import markdown, picture
from tba.errors import RunFailed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--lags", nargs="+", type=int, choices=LAGS, default=[64, 256, 16, 0, 4, 128, 1], metavar="LAG")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=SEEDS, metavar="SEED", help="if none: only run the searches"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time, a core each (%(default)s)")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    study = STUDIES[options.task]
    out = options.out or Path(f"docs/results/old-data-{options.task}.csv")
    rows = read(out, Row)

    def store(row: Row) -> None:
        rows.append(row)
        append(out, row)
        print(f"{row.arm}, lag {row.lag}, seed {row.seed}, {row.rate:g}, {row.second:g}: {row.result}", flush=True)

    if not options.show:
        run_all(
            lambda: missing(study, rows, options.only, options.lags, options.seeds),
            partial(take, study),
            store,
            jobs=options.jobs,
            hours=options.hours,
        )
    print("\n".join(markdown(study, rows)))
    if drawn := picture(study, rows):
        out.with_name(f"{out.stem}-lags.svg").write_text(drawn)


# --- runs -------------------------------------------------------------------------------------------------------------


def missing(
    study: Study, rows: Sequence[Row], names: Sequence[str], lags: Sequence[int], seeds: Sequence[int]
) -> Iterator[Run]:
    """Yield runs that have no row and can start now: first those of searches that have not ended, then the chosen
    settings on each reported seed."""
    done = {row.key for row in rows}
    chosen: list[tuple[int, str, Point]] = []
    for lag, name in product(lags, names):
        best, more = progress(study, rows, name, lag)
        runs = [make_run(name, lag, TUNING_SEEDS[seed], point) for point, seed in more]
        yield from (run for run in runs if run not in done)
        if not more:
            chosen.append((lag, name, best))
    for seed, (lag, name, best) in product(seeds, chosen):
        if (run := make_run(name, lag, seed, best)) not in done:
            yield run


def take(study: Study, run: Run) -> Row:
    config, began, failed = run.config(study), time.process_time(), ""
    found: list[Scored] = []
    try:
        for score in lagged_run(config, scored_after=study.examined, examine=examine_of(config, beta=BETA)):
            found.append(score)  # keeps the results before a failure
    except RunFailed as error:
        failed = str(error)
    last = (
        found[-1]
        if found
        else Scored(step=0, measures={study.result: float(study.sign < 0)}, reward=0, age=0, generated=())
    )
    return Row(
        **asdict(run),
        result=round(last.measures[study.result], 4),
        measures=json.dumps({name: float(f"{value:.4g}") for name, value in last.measures.items()}),
        curve=" ".join(f"{it.step}:{it.measures[study.result]:.4f}" for it in found),
        age=round(last.age, 1),
        cpu_seconds=round(time.process_time() - began, 1),
        failed=failed,
    )


if __name__ == "__main__":
    main()
