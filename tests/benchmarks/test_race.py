"""A race: which run comes next, when the goal was reached, and the memory of a command."""

import math
import shutil
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.harness import memory
from benchmarks.harness.memory import measured
from benchmarks.harness.rows import append, read
from benchmarks.science.laptop import LAPTOP
from benchmarks.science.race import TUNING_SEED, Race, Row, Run, markdown, most_steps, next_run, reached
from benchmarks.science.runs import finished_in_one_go
from benchmarks.science.speed import QUICKSTART
from flows.commands.arguments import read_changes
from tba.presets import preset
from tests.support.storage.synthetic import make_live_run

STORED = Path(__file__).parents[1] / "data" / "0.1.0"
BOTH = ["TRL's GRPO", "TRL's GRPO, paced"]


def row(run: Run, *, steps: float, seconds: float) -> Row:
    return Row(
        **asdict(run), steps=steps, seconds=seconds, seconds_per_step=1.0, reached=1.0, generated_per_second=math.nan,
        learned_per_second=math.nan, memory_gb=math.nan, curve="0:0:0 1:1:1",
    )  # fmt: skip


def test_rates_are_chosen_first_then_threads_then_the_seeds_run_with_both():
    rows, order = list[Row](), list[tuple[str, int, float, str]]()
    while run := next_run(QUICKSTART, rows, BOTH, [0, 1], 0.9):
        order.append((run.arm, run.seed, run.rate, run.threads))
        rows.append(row(run, steps={3e-4: 50, 6e-4: 30, 1.2e-3: math.inf}[run.rate], seconds=8 / int(run.threads)))
    arm = "TRL's GRPO"
    assert order == [
        *((arm, TUNING_SEED, rate, "1") for rate in (3e-4, 6e-4, 1.2e-3)),
        (arm, TUNING_SEED, 6e-4, "2"),
        *((name, seed, 6e-4, "2") for seed in (0, 1) for name in BOTH),
    ]


def test_a_rate_is_tried_no_longer_than_the_best_one_needed():
    name, rows = "one version behind", list[Row]()

    def run(rate: float, seed: int = TUNING_SEED) -> Run:
        return Run(arm=name, seed=seed, rate=rate, threads="shared", goal=0.7)

    first, second, third = LAPTOP.rates
    assert most_steps(LAPTOP, rows, run(first)) == LAPTOP.arms[name].steps
    rows += [row(run(first), steps=math.inf, seconds=1.0)]
    assert most_steps(LAPTOP, rows, run(second)) == LAPTOP.arms[name].steps
    rows += [row(run(second), steps=17.2, seconds=1.0), row(run(second, seed=0), steps=3.0, seconds=1.0)]
    assert most_steps(LAPTOP, rows, run(third)) == 20
    assert most_steps(LAPTOP, rows, run(second, seed=1)) == LAPTOP.arms[name].steps


def test_the_rate_beyond_is_tried_while_the_best_one_is_at_an_end():
    def tried(best: float) -> list[float]:
        rows = list[Row]()
        while (run := next_run(LAPTOP, rows, ["TRL's GRPO"], [], 0.7)) and len(rows) < 10:
            rows.append(row(run, steps=10 + abs(math.log(run.rate / best)), seconds=1.0))
        return [it.rate for it in rows]

    assert tried(3e-5) == [3e-5, 1e-4, 1e-5]
    assert tried(1e-4) == [3e-5, 1e-4, 1e-5, 3e-4]
    assert tried(3e-6) == [3e-5, 1e-4, 1e-5, 3e-6, 1e-6]
    assert tried(1e-8) == [3e-5, 1e-4, 1e-5, 3e-6, 1e-6]


def test_an_arm_may_take_the_rate_of_another_and_threads_of_its_own():
    names, rows, order = ["one version behind", "synchronous"], list[Row](), list[tuple[str, int, float, str]]()
    while run := next_run(LAPTOP, rows, names, [0], 0.5):
        order.append((run.arm, run.seed, run.rate, run.threads))
        rows.append(row(run, steps={3e-5: 1, 1e-4: 2, 1e-5: 3}[run.rate], seconds=1.0))
    assert order == [
        *(("one version behind", TUNING_SEED, rate, "shared") for rate in LAPTOP.rates),
        ("one version behind", 0, 3e-5, "shared"),
        ("synchronous", 0, 3e-5, "2"),
    ]


@pytest.mark.parametrize("race", [QUICKSTART, LAPTOP], ids=["quickstart", "laptop"])
def test_the_settings_of_every_arm_are_settings_of_the_preset(race: Race):
    for arm in race.arms.values():
        if not arm.trl:
            task = {"task.name": arm.task} if arm.task else {}
            written = [f"{name}={it}" for name, it in {**race.common, **arm.settings}.items()]
            preset(race.preset).replace({**task, **read_changes(Namespace(changes=[written]))})


def test_the_goal_is_reached_on_the_line_between_two_scored_versions():
    assert reached([(0, 0.0, 0.1), (8, 4.0, 0.5), (16, 10.0, 0.9)], 0.7) == pytest.approx((7.0, 12.0))
    assert reached([(0, 0.0, 0.1), (8, 4.0, 0.5)], 0.7) == (math.inf, math.inf)


def test_a_row_is_the_same_after_storage(tmp_path: Path):
    before = row(Run(arm="asynchronous", seed=0, rate=2e-5, threads="shared", goal=0.5), steps=math.inf, seconds=3.5)
    append(tmp_path / "rows.csv", before)
    [after] = read(tmp_path / "rows.csv", Row)
    assert repr(after) == repr(before) and after.key == before.key


@pytest.mark.parametrize("lives", [1, 2])
def test_a_run_that_was_continued_is_removed(tmp_path: Path, lives: int):
    assert not finished_in_one_go(str(tmp_path), "whole")
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "runs" / "whole"
    if lives == 1:
        (folder / "attempts" / "0002.json").unlink()
    assert finished_in_one_go(str(tmp_path), "whole") == folder.exists() == (lives == 1)


def test_a_run_that_lacks_steps_is_removed(tmp_path: Path):
    run = make_live_run(str(tmp_path), "live")
    assert not finished_in_one_go(str(tmp_path), "live") and not Path(run.url).exists()


def test_memory_of_a_command_includes_that_of_its_children(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "EVERY", 0.2)
    child = "import time; held = bytearray(b'x') * 300_000_000; time.sleep(2); print('done')"
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    printed, gigabytes = measured([sys.executable, "-c", command])
    assert printed == "done\n" and 0.3 < gigabytes < 0.5


def test_a_command_that_fails_is_shown_with_what_it_said():
    with pytest.raises(RuntimeError, match=r"exit code 3(?s:.*)no room"):
        measured([sys.executable, "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"])


def test_the_table_shows_the_chosen_rate_alone_and_says_when_the_search_has_not_ended():
    name = "synchronous TB"

    def made(rate: float, steps: float, *, seed: int = TUNING_SEED, count: str = "1", seconds: float = 9.0) -> Row:
        return row(Run(arm=name, seed=seed, rate=rate, threads=count, goal=0.9), steps=steps, seconds=seconds)

    def shown(rows: list[Row]) -> str:
        return next(line for line in markdown(QUICKSTART, rows, 0.9) if line.startswith(f"| {name} |"))

    tried = [made(rate, steps) for rate, steps in [(3e-4, 20.0), (6e-4, 30.0), (1.2e-3, 40.0)]]
    seeds = [made(3e-4, 25.0, seed=0, seconds=11.0)]
    assert "0.0003, search not ended" in shown(tried + seeds)
    tried += [made(1.5e-4, 10.0), made(7.5e-5, 15.0), made(1.5e-4, 10.0, count="2")]
    seeds += [made(1.5e-4, 12.0, seed=0, seconds=7.0)]
    assert shown(tried + seeds).startswith(f"| {name} | 0.00015 | 1 | 7")
    assert shown(tried + seeds).endswith("| 1 of 1 |")
