"""`tba watch`: the picture of a run, in a terminal and in a pipe."""

import json
import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import storage
from flows.commands import watch, watch_queries
from storage import layout
from storage.log.trajectories import Trajectories
from storage.runs.control import change_state
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.types import Score, Version
from tests.support.builders import make_shard
from tests.support.faults.rewriting import with_digest
from tests.support.flows.command_line import printed
from tests.support.storage.synthetic import PROMPTS, copy_run


def test_watch_shows_one_picture_of_80_columns(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, "watch", "live", "--once")
    assert max(map(len, out.splitlines())) <= 80
    for text in ("step 4 of 8", "interrupted", "loss", "greedy", "pass@16", "48 trajectories in 8 shards", "idle 2.0%"):
        assert text in out


@pytest.mark.parametrize(
    ("steps", "said"), [(8, "50%, 2 s to go"), (604, "1%, 5 min to go"), (10_004, "1 h 23 min to go")]
)
def test_watch_tells_how_long_it_will_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str, steps: int, said: str
):
    """Each step takes half a second, and four have been taken."""
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    record = json.loads((Path(run.url) / layout.RUN).read_text())
    record["config"]["training"]["steps"] = steps
    (Path(run.url) / layout.RUN).write_bytes(with_digest(record))
    assert "to go" not in printed(capsys, "watch", run.url, "--once")
    with HeldLease(run, "trainer", every=60):
        out = printed(capsys, "watch", run.url, "--once")
    assert said in out and max(map(len, out.splitlines())) <= 80


def test_watch_tells_how_the_buffer_grows_and_how_long_the_evaluator_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    with storage.connect(run) as con:
        ((seconds, rows),) = con.execute(
            "select epoch(max(created_at) - min(created_at)), sum(rows) filter (sync > 0) from syncs"
        ).fetchall()
    with HeldLease(run, "evaluator", every=60):
        Events(run, "evaluator", 1).write("started", "the evaluator lives")
        told = printed(capsys, "watch", run.url, "--once")
        assert f"{60 * rows / seconds:+,.0f}/min" in told
        assert re.search(r"evaluator +starting", told), "it has scored nothing in this life"
        time.sleep(2.0)
        score = Score(version=Version(1, 1), step=2, metric="greedy", value=0.5, n=1, seconds=1.0)
        Evaluations(run).write([score])
        [idle] = re.findall(r"evaluator +idle (\d+)%", printed(capsys, "watch", run.url, "--once"))
        assert 45 <= int(idle) < 100, "one second in more than two"


def test_watch_of_a_run_without_anything_shows_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    config = Run.open(f"{root}/runs/first").config
    run = Run.create(str(tmp_path), "new", config=config, sampler_sql="", code_version="")
    assert "step 0 of 8" in printed(capsys, "watch", run.url, "--once")


def test_watch_shows_the_newest_responses_of_searchers_and_no_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    newest = re.findall(r"newest .*", printed(capsys, "watch", run.url, "--once"))
    elsewhere = layout.imported("0" * 64)
    rows = make_shard({PROMPTS[0]: [7.0] * 50}, searcher=elsewhere, version_start=Version(2, 1))
    Trajectories(run).append(elsewhere, 0, rows)
    assert re.findall(r"newest .*", printed(capsys, "watch", run.url, "--once")) == newest
    assert newest and newest[0].startswith("newest 12 ")  # two searchers, each with two prompts


def test_watch_reads_no_more_of_a_long_run_than_of_a_short_one(tmp_path: Path, root: str):
    """Only the newest objects are opened. The others are removed here after the first look."""
    run = copy_run(Run.open(f"{root}/runs/first"), tmp_path / "runs")
    view = watch.look(run)
    expected = view.newest_rewards(), view.values(watch_queries.NEWEST_AGES)
    with view.con.cursor() as con:
        newest = {key for (key,) in con.execute("select max(key) from shards group by searcher").fetchall()}
    ledgers = sorted(Path(run.url, layout.DRAWS).iterdir())
    for path in (*Path(run.url, layout.TRAJECTORIES).rglob("*.parquet"), *ledgers[:-1]):
        if str(path.relative_to(run.url)) not in newest:
            path.unlink()
    assert (view.newest_rewards(), view.values(watch_queries.NEWEST_AGES)) == expected
    assert expected[0][1] == 12 and expected[1][0] is not None


def test_many_searchers_are_summed_up_beside_the_wanted_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    change_state(run, desired="run", searchers=9)
    with ExitStack() as held:
        for n in range(9):
            lease = held.enter_context(HeldLease(run, f"searcher-{n:03d}", every=60))
            lease.tell(f"round {n}", seconds_generate=90 - 10 * n, seconds_store=10 + 10 * n, tokens=1000 * n)
            lease.renew()
        told = printed(capsys, "watch", run.url, "--once")
    assert "9 of 9 searchers" in told
    assert "9 generate 10% to 90% of their time  360 tokens/s" in told
    assert "generates 10% of its time  80 tokens/s  round 8" in told
    assert "searcher-001" not in told


def test_texts_of_roles_cannot_control_the_terminal_and_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    Events(run, "searcher-000", 1).write("odd", "no [/bold] answer: \x1b]0;owned\x07\u202e\nand more")
    with HeldLease(run, "evaluator", every=60) as lease:
        lease.tell("waits for [/data] and [red]more")
        lease.renew()
        told = printed(capsys, "watch", run.url, "--once")
    assert "searcher-000  odd: no [/bold] answer: \ufffd]0;owned\ufffd\ufffd and more" in told
    assert "waits for [/data] and [red]more" in told


def test_watch_ends_with_the_run(capsys: pytest.CaptureFixture[str]):
    assert "finished" in printed(capsys, "watch", "first")


def test_watch_into_a_pipe_prints_a_line_whenever_something_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str, monkeypatch: pytest.MonkeyPatch
):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    looks: list[str] = []

    def wait(seconds: float) -> None:
        looks.append(capsys.readouterr().out)
        if len(looks) == 2:
            change_state(run, desired="stop")

    monkeypatch.setattr("time.sleep", wait)
    last = printed(capsys, "watch", run.url)
    assert [it.count("\n") for it in (*looks, last)] == [1, 0, 1]
    assert "interrupted  step 4 of 8  version 2  reward " in looks[0]
    assert "  greedy 0: 0.250" in looks[0] and "  stopped  step 4 of 8  " in last
