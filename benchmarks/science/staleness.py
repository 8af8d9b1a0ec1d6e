"""Measure staleness curves on the quickstart: accuracy of each objective by the age of its data.

    python -m benchmarks.science.staleness [--only ARM …] [--lags 64 …] [--seeds 0 …] [--hours H] [--out FILE.csv]
    python -m benchmarks.science.staleness --show        only show the tables and charts of stored results

Each run takes 256 steps on 16 prompts with 8 responses each: 32,768 trajectories. Settings are those of the quickstart,
except for batch, number of steps and decay (`BASE`). The lag is exact (benchmarks/science/lagged.py): a lag of 0 is
on-policy, and at a lag of 64 the first quarter of the run learns from responses of the base policy. The result is the
share of right answers after the last step, to 500 held-out problems with 4 sampled responses each. Each seed has its
own base policy.

Learning rate and beta of each arm are chosen by sweeps over `RATES` x `BETAS` (only `RATES` if beta has no part in the
objective), on a seed that is not reported. There is one sweep on-policy, one at a lag of 16 for lags of 1 to 16, and
one at a lag of 64. The best accuracy wins; if several are equal, the smaller rate, then the smaller beta. `VARIANTS`
are attempts to keep trajectory balance accurate at a lag of 64.

Each finished run is a row of the CSV with all changed settings, and is not repeated, so the command continues where it
stopped.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.harness.rows import append, line, read
from benchmarks.harness.rows import spread as plain_spread
from benchmarks.science.lagged import Scored, lagged_run, make_scores
from flows.pages.charts import Chart
from tba.config import Config
from tba.errors import RunFailed
from tba.presets import preset

STEPS, PROMPTS, RESPONSES = 256, 16, 8
BASE: Mapping[str, Any] = {
    "training.steps": STEPS,
    "training.decay_steps": STEPS // 2,
    "training.prompts_per_step": PROMPTS,
    "training.responses_per_prompt": RESPONSES,
    "training.groups_per_micro_batch": PROMPTS,
    "search.prompts_per_round": PROMPTS,
    "search.responses_per_prompt": RESPONSES,
    "search.initial_fill": PROMPTS * RESPONSES,
    "sampling.recent_share": 1.0,
    "sampling.copies": "all",
    "sync.every": 1,
}
SCORED = (STEPS // 4, STEPS // 2, 3 * STEPS // 4, STEPS)

LAGS, SEEDS, TUNING_SEED = (1, 4, 16, 64), (0, 1, 2), 100
RATES, BETAS = (1.5e-4, 3e-4, 6e-4), (0.05, 0.25)


@dataclass(frozen=True)
class Arm:
    settings: Mapping[str, Any] = field(default_factory=dict)
    rates: Sequence[float] = RATES
    betas: Sequence[float] = (0.05,)
    momentum: float = 0.9


ANCHORED = {"objective.anchor": "behaviour"}
ARMS: Mapping[str, Arm] = {
    "TB": Arm(betas=BETAS),
    "TB, anchored at what sampled": Arm(ANCHORED, betas=BETAS),
    "TBA'": Arm({"objective.name": "tba-prime"}, betas=BETAS),
    "Dr. GRPO": Arm({"objective.name": "dr-grpo"}),
    "RLOO, no penalty": Arm({"objective.name": "rloo", "objective.penalty": "none"}),
    "Proximal RLOO": Arm({"objective.name": "proximal-rloo"}),
    "PPO": Arm({"objective.name": "ppo"}, betas=BETAS),
    "Online DPO": Arm({"objective.name": "online-dpo"}, betas=BETAS),
}

_WIDE = (5e-5, 1.5e-4, 4.5e-4)
_CLIPPED = {"objective.name": "tba-prime", "objective.correction": "clip"}
VARIANTS: Mapping[str, Arm] = {
    "TB, with the settings of the anchored": Arm(rates=(3e-4,), betas=(0.25,)),
    "TB, reference reset every 32 steps": Arm({"objective.reference_reset": 32}, rates=(3e-4,), betas=(0.25, 0.5)),
    "TBA', reference reset every 32 steps": Arm(
        {"objective.name": "tba-prime", "objective.reference_reset": 32}, rates=(3e-4,), betas=(0.25,)
    ),
    "TBA', clipped": Arm(_CLIPPED, rates=(3e-4,), betas=(0.25,)),
    "OAPL": Arm({"objective.name": "oapl"}, rates=(3e-4,), betas=(0.25,)),
    "TB, anchored at what sampled, S = 16": Arm(
        {**ANCHORED, "search.responses_per_prompt": 16}, rates=(3e-4,), betas=(0.25,)
    ),
    "TB, no momentum": Arm(rates=_WIDE, betas=BETAS, momentum=0.0),
    "TB, anchored at what sampled, no momentum": Arm(ANCHORED, rates=_WIDE[1:], betas=(0.1, 0.25, 1.0), momentum=0.0),
    "TB, reference reset every 32 steps, no momentum": Arm(
        {"objective.reference_reset": 32}, rates=_WIDE[1:2], betas=(0.5, 1.0), momentum=0.0
    ),
    "TB, half of the slots from all data, no momentum": Arm(
        {"sampling.recent_share": 0.5, "sampling.copies": "newest"}, rates=_WIDE[1:2], betas=(0.25,), momentum=0.0
    ),
    "TBA', clipped, no momentum": Arm(_CLIPPED, rates=_WIDE[1:2], betas=(0.25,), momentum=0.0),
    "OAPL, no momentum": Arm({"objective.name": "oapl"}, rates=_WIDE[1:2], betas=(0.25,), momentum=0.0),
    "Dr. GRPO, no momentum": Arm(ARMS["Dr. GRPO"].settings, rates=_WIDE, momentum=0.0),
    "RLOO, no penalty, no momentum": Arm(ARMS["RLOO, no penalty"].settings, rates=_WIDE, momentum=0.0),
}
"""Each variant is swept over the values that can matter for it."""
HELD: Sequence[str] = ("TB, with the settings of the anchored",)
"""The variants that are reported on all seeds."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The identity of a run: the first columns of its row of the CSV."""

    arm: str
    lag: int
    seed: int
    rate: float
    beta: float
    momentum: float
    steps: int
    settings: str  # JSON of all other changes to quickstart and `BASE`

    @property
    def config(self) -> Config:
        return preset("quickstart").replace(
            {
                **BASE,
                "seed": self.seed,
                "sync.lag": self.lag,
                "sync.keep_versions": self.lag + 2,
                "training.learning_rate": self.rate,
                "objective.beta_start": self.beta,
                "objective.beta_end": self.beta,
                "training.adam_beta1": self.momentum,
                **json.loads(self.settings),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    sampled: float
    greedy: float
    reward: float  # mean of the trajectories that the last quarter drew, like `age`
    age: float
    curve: str  # sampled accuracy by step
    cpu_seconds: float
    failed: str  # why the run ended early, or empty; a failed run has its last scores


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*ARMS, *VARIANTS], default=[*ARMS, *VARIANTS], metavar="ARM")
    parser.add_argument("--lags", nargs="+", type=int, choices=(0, *LAGS), default=[64, 16, 0, 4, 1], metavar="LAG")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=SEEDS, metavar="SEED", help="if none: only run the sweeps"
    )
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path, default=Path("docs/results/staleness.csv"))
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    ends = time.monotonic() + 3600 * (0 if options.show else options.hours)
    rows = read(options.out, Row)
    while time.monotonic() < ends and (run := next_run(rows, options.only, options.lags, options.seeds)):
        rows.append(take(run))
        append(options.out, rows[-1])
        print(f"{run.arm}, lag {run.lag}, seed {run.seed}, {run.rate:g}, {run.beta:g}: {rows[-1].sampled}", flush=True)
    print("\n".join(markdown(rows)))
    for name, drawn in pictures(rows).items():
        options.out.with_name(f"{options.out.stem}-{name}.svg").write_text(drawn)


# --- runs -------------------------------------------------------------------------------------------------------------


def next_run(rows: Sequence[Row], names: Sequence[str], lags: Sequence[int], seeds: Sequence[int]) -> Run | None:
    """Return the first run that has no row: the sweeps, then the chosen settings on each reported seed."""
    done = {_key(row) for row in rows}
    for lag, name in product(lags, names):
        for run in sweep(name, tuned_at(lag)) if lag in lags_of(name) else ():
            if _key(run) not in done:
                return run
    for seed, lag, name in product(seeds, lags, names):
        if lag in lags_of(name) and seeds_of(name):
            best = chosen(rows, name, lag)
            run = make_run(name, lag, seed, best.rate, best.beta)
            if _key(run) not in done:
                return run
    return None


def lags_of(name: str) -> Sequence[int]:
    """Return the lags at which an arm runs. Most variants run only at the greatest lag. Trajectory balance, with and
    without momentum, also runs on-policy for comparison."""
    if name.startswith("TB, no momentum"):
        return (0, 64)
    return LAGS[-1:] if name in VARIANTS else (0, *LAGS) if name == "TB" else LAGS


def seeds_of(name: str) -> Sequence[int]:
    return SEEDS if name in ARMS or name in HELD else ()


def tuned_at(lag: int) -> int:
    return 64 if lag > 16 else 16 if lag else 0


def sweep(name: str, lag: int) -> list[Run]:
    arm = arm_of(name)
    return [make_run(name, lag, TUNING_SEED, rate, beta) for rate, beta in product(arm.rates, arm.betas)]


def chosen(rows: Sequence[Row], name: str, lag: int) -> Row:
    """Return the best row of a finished sweep."""
    keys = {_key(run) for run in sweep(name, tuned_at(lag))}
    return min((row for row in rows if _key(row) in keys), key=lambda row: (-row.sampled, row.rate, row.beta))


def make_run(name: str, lag: int, seed: int, rate: float, beta: float) -> Run:
    arm = arm_of(name)
    settings = json.dumps(dict(arm.settings), sort_keys=True)
    return Run(
        arm=name,
        lag=lag,
        seed=seed,
        rate=rate,
        beta=beta,
        momentum=arm.momentum,
        steps=STEPS,
        settings=settings,
    )


def arm_of(name: str) -> Arm:
    return ARMS[name] if name in ARMS else VARIANTS[name]


def take(run: Run) -> Row:
    began, failed = time.process_time(), ""
    scores: list[Scored] = []
    try:
        for score in lagged_run(run.config, scored_after=SCORED, examine=make_scores(run.config)):
            scores.append(score)  # keeps the scores before a failure
    except RunFailed as error:
        failed = str(error)
    last = scores[-1] if scores else None
    return Row(
        **asdict(run),
        sampled=round(last.measures["sampled"], 4) if last else 0.0,
        greedy=round(last.measures["greedy"], 4) if last else 0.0,
        reward=round(last.reward, 4) if last else 0.0,
        age=round(last.age, 1) if last else 0.0,
        curve=" ".join(f"{it.step}:{it.measures['sampled']:.4f}" for it in scores),
        cpu_seconds=round(time.process_time() - began, 1),
        failed=failed,
    )


def _key(run: Run) -> tuple[Any, ...]:
    return tuple(getattr(run, name) for name in Run.__dataclass_fields__)


# --- results ----------------------------------------------------------------------------------------------------------


def reported(rows: Sequence[Row], name: str, lag: int) -> list[Row]:
    """Return the rows of the chosen settings on the reported seeds. Empty until the sweep is finished."""
    keys = {_key(run) for run in sweep(name, tuned_at(lag))}
    if len({_key(row) for row in rows} & keys) < len(keys):
        return []
    best = chosen(rows, name, lag)
    keys = {_key(make_run(name, lag, seed, best.rate, best.beta)) for seed in SEEDS}
    return [row for row in rows if _key(row) in keys]


# --- tables and charts ------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| objective | {' | '.join(f'lag {lag}' for lag in (0, *LAGS))} |"
    yield "|---|" + "---:|" * (1 + len(LAGS))
    for name in ARMS:
        cells = [spread([row.sampled for row in reported(rows, name, lag)]) for lag in (0, *LAGS)]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield "| variant, at a lag of 64 | learning rate | beta | seed of the sweep | reported |"
    yield "|---|---:|---:|---:|---:|"
    for name in (*ARMS, *VARIANTS):
        keys = {_key(run) for run in sweep(name, 64)}
        found = [row for row in rows if _key(row) in keys]
        if found:
            best = chosen(rows, name, 64)
            tried = f"{best.sampled:.3f}" + (f" ({len(found)} of {len(keys)})" if len(found) < len(keys) else "")
            held = spread([row.sampled for row in reported(rows, name, 64)])
            yield f"| {name} | {best.rate:g} | {best.beta:g} | {tried} | {held} |"
    yield ""
    yield from ahead(rows)
    yield ""
    yield from sweeps(rows)


def ahead(rows: Sequence[Row]) -> Iterator[str]:
    first = "TB, anchored at what sampled"
    yield f"| seed by seed, the anchored form is ahead of | {' | '.join(f'lag {lag}' for lag in LAGS)} |"
    yield "|---|" + "---:|" * len(LAGS)
    ours = {lag: {row.seed: row.sampled for row in reported(rows, first, lag)} for lag in LAGS}
    for name in ARMS:
        leads = [
            [ours[lag][row.seed] - row.sampled for row in reported(rows, name, lag) if row.seed in ours[lag]]
            for lag in LAGS
        ]
        if name != first:
            yield f"| {name} | {' | '.join(map(spread, leads))} |"


def sweeps(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of all runs of the sweeps."""
    rates = sorted({row.rate for row in rows if row.seed == TUNING_SEED})
    yield "| lag | arm | beta | " + " | ".join(f"{rate:g}" for rate in rates) + " |"
    yield "|---:|---|---:|" + "---:|" * len(rates)
    for lag, name in product((0, 16, 64), (*ARMS, *VARIANTS)):
        keys = {_key(run) for run in sweep(name, lag)} if lag in lags_of(name) else set()
        found = {(row.beta, row.rate): row.sampled for row in rows if _key(row) in keys}
        for beta in sorted({beta for beta, _ in found}):
            cells = [f"{found[beta, rate]:.3f}" if (beta, rate) in found else "" for rate in rates]
            yield f"| {lag} | {name} | {beta:g} | {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    """Return mean and standard error over seeds, and the number of seeds if some are missing."""
    missing = f" ({len(values)} of {len(SEEDS)} seeds)" if 0 < len(values) < len(SEEDS) else ""
    return f"{plain_spread(values)}{missing}"


def pictures(rows: Sequence[Row]) -> dict[str, str]:
    """Return two charts: final accuracy by lag, and accuracy by step at the greatest lag."""
    by_lag = [
        line(name, {math.log2(lag): [row.sampled for row in reported(rows, name, lag)] for lag in LAGS})
        for name in ARMS
    ]
    by_step = [line(name, _by_step(reported(rows, name, LAGS[-1]))) for name in ARMS]
    by_step.append(line("TB, on policy", _by_step(reported(rows, "TB", 0))))
    trajectories = f"{STEPS * PROMPTS * RESPONSES:,} trajectories"
    drawn = {
        "lags": (f"sampled accuracy after {trajectories}", by_lag, "log2 lag"),
        "steps": (f"sampled accuracy at a lag of {LAGS[-1]}", by_step, "step"),
    }
    return {
        name: Chart(title, [it for it in series if it.points], x_name=x_name).picture()
        for name, (title, series, x_name) in drawn.items()
        if any(len(it.points) > 1 for it in series)
    }


def _by_step(rows: Sequence[Row]) -> dict[float, list[float]]:
    curves = [dict(point.split(":") for point in row.curve.split()) for row in rows]
    return {step: [float(curve[str(step)]) for curve in curves if str(step) in curve] for step in SCORED}


if __name__ == "__main__":
    main()
