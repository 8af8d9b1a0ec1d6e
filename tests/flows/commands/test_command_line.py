"""The command `tba`: what it prints, what it refuses, and how it ends."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
import pytest

import storage
from benchmarks.harness.servers import Server
from flows.cli import main
from flows.commands import watch, watch_queries
from flows.planning import describe, run_summary
from storage import layout
from storage.log.trajectories import Trajectories
from storage.runs.control import change_state
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.leases import SUPERVISOR, read_leases
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from tba.presets import preset
from tba.types import Score, Version
from tests.conftest import s3_root
from tests.support.builders import make_shard
from tests.support.faults.irregular import PATIENCE, Kind, put_irregular
from tests.support.faults.rewriting import with_digest
from tests.support.sampled_parameters import sampled
from tests.support.storage.synthetic import PROMPTS, STEPS, S, copy_run, make_live_run, make_run

COMMANDS = (
    "run", "resume", "runs", "watch", "scale", "stop", "sql", "report", "check", "export", "grade", "audit", "fork",
    "compact", "import", "wandb",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a root with a finished run, `first`, and a later, interrupted run, `live`. No test changes them."""
    root = str(tmp_path_factory.mktemp("root"))
    make_run(root)
    make_live_run(root)
    return root


@pytest.fixture(autouse=True)
def default_root(root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TBA_ROOT", root)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def first(root: str, tmp_path: Path) -> Run:
    """Return a copy of the finished run that a test may change."""
    return copy_run(Run.open(f"{root}/runs/first"), tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that refuses its arguments or input. Return the error, which is one line without a traceback."""
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


# --- help, errors and ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: tba {command}" in capsys.readouterr().out


def test_help_lists_every_command_and_imports_nothing_heavy():
    script = "import sys, flows.cli\ntry: flows.cli.main(['--help'])\nexcept SystemExit: print(*sys.modules, sep='\\n')"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert all(f"\n    {command} " in out for command in COMMANDS)
    heavy = {"torch", "prefect", "duckdb", "pyarrow", "pydantic", "rich", "s3fs", "wandb", "transformers", "numpy"}
    assert not heavy & set(out.splitlines())


@pytest.mark.parametrize(
    "arguments", [(), ("nothing",), ("sql",), ("runs", "--yaml"), ("watch", "first", "--every", "0")]
)
def test_bad_usage_ends_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: tba" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("sql", "nobody", "select 1"), ("check", "nobody"), ("watch", "nobody", "--once"), ("report", "nobody")],
)
def test_a_run_that_does_not_exist_is_named(arguments: tuple[str, ...], root: str, capsys: pytest.CaptureFixture[str]):
    assert f"{root}/runs/nobody" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "quickstart", "--root", "/proc/nope"), "root: nothing can be stored under '/proc/nope'"),
        (("run", "quickstart", "--dry-run", "--set", "training=3"), "training"),
        (("run", "quickstart", "--dry-run", "--set", "sampling.sql={binary}"), "sampling.sql"),
        (("run", "quickstart", "--dry-run", "--set", "sampling.sql=/no/such/file"), "sampling.sql"),
        (
            ("run", "quickstart", "--dry-run", "--set", "model.path=/no/such/folder"),
            "model.path must be an existing folder",
        ),
        (("sql", "first", "-f", "{binary}"), "is not text"),
        (("sql", "first", "-f", "/no/such/file"), "/no/such/file: No such file"),
        (("export", "first", "--version", "4", "/proc/nope/x"), "DIR: /proc/nope/x cannot be written"),
        (("runs", "/no/such/folder"), "ROOT: there is no folder '/no/such/folder'"),
        (("grade", "gsm8k", "{binary}"), "is not UTF-8"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(128, 256)))
    assert said in refused(capsys, *(argument.format(binary=binary) for argument in arguments))


WITHOUT_PACKAGES = ("task.options.classifier_kind=label", "model.path=gpt2")
"""Changes after which the preset `redteam-laptop` needs no optional packages."""


def test_a_preset_may_have_another_name_than_its_task(capsys: pytest.CaptureFixture[str]):
    said = printed(capsys, "run", "redteam-laptop", "--dry-run", "--set", *WITHOUT_PACKAGES)
    assert re.search(r"^task +redteam$", said, re.M) and "victim_template=chat" in said
    other = printed(capsys, "run", "redteam", "--dry-run")
    assert re.search(r"^task +redteam$", other, re.M) and "victim_template" not in other


def test_the_default_name_of_a_run_begins_with_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[Run] = []
    monkeypatch.setattr("flows.commands.run.supervise", lambda run: started.append(run) or 0)
    for asked in ("redteam-laptop", "redteam"):
        assert main(["run", asked, "--root", str(tmp_path), "--set", *WITHOUT_PACKAGES]) == 0
    assert [run.name.rpartition("-")[0].rpartition("-")[0] for run in started] == ["redteam-laptop", "redteam"]
    assert [run.config["task"]["name"] for run in started] == ["redteam", "redteam"]


def test_an_output_that_is_closed_early_is_not_blamed_on_the_input(tmp_path: Path):
    file = tmp_path / "responses.jsonl"
    file.write_text(json.dumps({"response": "4", "answer": "4", "filler": "x" * 1000}) + "\n" * 1)
    file.write_text(file.read_text() * 2000)
    command = f"{sys.executable} -m flows.cli grade gsm8k {file} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]):
    for arguments in (["--debug", "check", "nobody"], ["check", "nobody", "--debug"]):
        with pytest.raises(ValueError, match="nobody"):
            main(arguments)


def test_storage_that_is_damaged_is_no_bad_usage(first: Run, capsys: pytest.CaptureFixture[str]):
    Path(first.url, layout.RUN).write_text("{")
    assert main(["sql", first.url, "select 1"]) == 1
    assert layout.RUN in capsys.readouterr().err


def test_a_reader_that_closes_the_output_early_causes_no_error(root: str):
    tba = [sys.executable, "-m", "flows.cli", "sql", "first", "select range(100000)", "--json"]
    process = subprocess.Popen(tba, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (0, "")


def test_an_interrupt_ends_cleanly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pressed)  # as if Ctrl-C came while waiting for the next look
    assert main(["watch", "live"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_a_query_that_takes_too_long_can_be_interrupted(capsys: pytest.CaptureFixture[str]):
    pressed = threading.Timer(2.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    pressed.start()
    assert main(["sql", "first", "select count(*) from range(1000000000000) t where t.range % 7 = 3"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_looking_at_a_run_needs_neither_torch_nor_prefect(tmp_path: Path):
    script = """
import sys
from flows.cli import main
report = f"report first --output {sys.argv[1]}"
for command in ("runs", "sql first from/**/steps", "check first", "watch first", report):
    assert main(command.split()) == 0
print(*sys.modules, sep="\\n")
"""
    arguments = [sys.executable, "-c", script, str(tmp_path / "report.html")]
    out = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "prefect", "transformers", "wandb", "s3fs"} & set(out.splitlines())


# --- runs -------------------------------------------------------------------------------------------------------------


def test_runs_lists_the_newest_first(capsys: pytest.CaptureFixture[str], root: str):
    expected = [
        {
            "run": "live", "task": "quickstart", "parent": "", "state": "interrupted", "step": 4, "version": 2,
            "score": 0.25, "searchers": 0,
        },
        {
            "run": "first", "task": "quickstart", "parent": "", "state": "finished", "step": STEPS, "version": 4,
            "score": 0.75, "searchers": 0,
        },
    ]  # fmt: skip
    assert json.loads(printed(capsys, "runs", root, "--json")) == expected
    assert json.loads(printed(capsys, "runs", "--json")) == expected
    table = printed(capsys, "runs").splitlines()
    assert [line.split() for line in table if "first" in line] == [
        ["first", "quickstart", "finished", "8", "4", "0.750"]
    ]


def test_runs_shows_living_searchers_and_the_wanted_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    with HeldLease(run, "searcher-000", every=60), HeldLease(run, "trainer", every=60) as trainer:
        trainer.tell("step 5 of 8", step=5)
        trainer.renew()
        (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
        assert (told["state"], told["searchers"], told["step"]) == ("running", 1, 5)
        change_state(run, desired="stop")
        (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
        assert told["state"] == "stopping"
    (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert (told["state"], told["searchers"]) == ("stopped", 0)


def test_a_run_that_has_failed_says_so_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    change_state(run, desired="stop", why="failed: trainer ended 6 times within 600 s")
    (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert told["state"] == "failed"
    assert "trainer ended 6 times" in printed(capsys, "watch", run.url, "--once")


def test_runs_never_shortens_the_name_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    name = "quickstart-20261121-180631-with-more"
    Run.create(str(tmp_path), name, config=preset("quickstart").to_dict(), sampler_sql="", code_version="")
    monkeypatch.setenv("COLUMNS", "60")
    assert name in printed(capsys, "runs", str(tmp_path))


def test_a_run_with_a_living_supervisor_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    with HeldLease(run, SUPERVISOR, every=0.2) as held:
        assert f"already has a supervisor, pid {os.getpid()}" in refused(capsys, "resume", run.url)
        held.check()


def test_a_run_is_not_resumed_with_other_settings_and_the_error_names_the_command_that_can(
    capsys: pytest.CaptureFixture[str],
):
    said = refused(capsys, "resume", "first", "--set", "training.ranks=2")
    assert "--set: a run keeps its settings; `tba fork first --step N --set …` goes on from a step with others" in said


def test_a_finished_run_is_not_started_again(capsys: pytest.CaptureFixture[str], root: str):
    said, run = printed(capsys, "resume", "first"), Run.open(f"{root}/runs/first")
    assert (
        f"first has finished already; `tba fork {run.url} --step {STEPS} --set training.steps=…` goes further" in said
    )
    assert "\nversion 4, step 8: greedy 0.75" in said
    assert read_leases(run) == []


def test_a_run_that_lacks_its_last_checkpoint_has_not_finished(tmp_path: Path, root: str):
    run = copy_run(Run.open(f"{root}/runs/first"), tmp_path / "runs")
    assert run_summary.has_all(run)
    newest = Checkpoints(run).newest()
    assert newest
    run.store.delete(layout.checkpoint(newest) + layout.MANIFEST)
    assert not run_summary.has_all(run)


def test_runs_lists_a_run_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Run.create(
        str(tmp_path), "odd", config={"task": {"name": "other"}, "seed": "blue"}, sampler_sql="", code_version=""
    )
    (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert (told["run"], told["task"], told["state"], told["step"]) == ("odd", "other", "unreadable", None)


def test_runs_lists_a_run_whose_record_is_damaged_after_the_others_and_no_other_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    copy_run(Run.open(f"{root}/runs/first"), tmp_path / "runs")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "run.json").write_text('{"run": "torn", ')
    told = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert [(run["run"], run["state"]) for run in told] == [("first", "finished"), ("torn", "unreadable")]


def test_runs_of_an_empty_root_says_how_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "tba run quickstart" in printed(capsys, "runs", str(tmp_path))
    assert printed(capsys, "runs", str(tmp_path), "--json") == "[]\n"
    (tmp_path / "runs").mkdir()
    assert f"`tba runs {tmp_path}`" in printed(capsys, "runs", f"{tmp_path}/runs/")


# --- sql --------------------------------------------------------------------------------------------------------------


def test_sql_answers_as_a_table(capsys: pytest.CaptureFixture[str]):
    assert "│ count_star() │" in printed(capsys, "sql", "first", "select count(*) from steps")


def test_sql_takes_its_options_before_and_after_the_query(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    query, path = "select 7 as seven", tmp_path / "question.sql"
    path.write_text(query)
    for words in (["--csv", "first", query], ["first", "--csv", query], ["first", query, "--csv"]):
        assert printed(capsys, "sql", *words) == "seven\n7\n"
    assert printed(capsys, "sql", "-f", str(path), "first", "--csv") == "seven\n7\n"
    for words in (["-f", str(path), "first", query], ["first", query, "-f", str(path)]):
        assert "-f: there is a QUERY already" in refused(capsys, "sql", *words)


def test_sql_refuses_two_columns_of_one_name_where_one_would_be_lost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    query = "select d.step, t.step from draws d join trajectories t using (trajectory_id)"
    for form in (["--json"], ["--parquet", str(tmp_path / "answer.parquet")]):
        assert f"{form[0]}: 'step' names more than one column" in refused(capsys, "sql", "first", query, *form)
    assert printed(capsys, "sql", "first", query, "--csv").startswith("step,step\n")


def test_sql_answers_as_rows_of_json(capsys: pytest.CaptureFixture[str]):
    query = """
        select step, loss > 0 as learns, null as nothing, 'nan'::double as undefined, [1, 2] as list,
            map {'a': 1} as parts, 1.5::decimal(4, 2) as decimal, sum(step)::hugeint as big,
            date '2026-01-02' as day, '{"a": 1}'::json as text
        from steps where step = 1 group by all
    """
    assert json.loads(printed(capsys, "sql", "first", query, "--json")) == [
        {
            "step": 1, "learns": True, "nothing": None, "undefined": None, "list": [1, 2], "parts": {"a": 1},
            "decimal": 1.5, "big": 1, "day": "2026-01-02", "text": '{"a": 1}',
        }
    ]  # fmt: skip
    assert json.loads(printed(capsys, "sql", "first", "select 1 from steps where false", "--json")) == []


@pytest.mark.parametrize(
    "view", sampled(["trajectories", "prompts", "events", "shards"], kept=["trajectories", "events"])
)
def test_sql_answers_in_every_form(view: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    rows = json.loads(printed(capsys, "sql", "first", f"from {view}", "--json"))
    lines = list(csv.reader(io.StringIO(printed(capsys, "sql", "first", f"from {view}", "--csv"))))
    printed(capsys, "sql", "first", f"from {view}", "--parquet", str(tmp_path / "answer.parquet"))
    assert rows
    assert lines[0] == list(rows[0])
    assert len(lines) == len(rows) + 1
    assert pq.read_metadata(tmp_path / "answer.parquet").num_rows == len(rows)


def test_sql_never_overwrites_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    target = tmp_path / "answer.parquet"
    target.write_text("mine")
    assert "exists already" in refused(capsys, "sql", "first", "select 1", "--parquet", str(target))
    assert target.read_text() == "mine"


def test_sql_takes_a_file_or_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    query = tmp_path / "question.sql"
    query.write_text("create temp table best as select max(reward) as reward from trajectories;\nselect * from best;\n")
    assert json.loads(printed(capsys, "sql", "first", "-f", str(query), "--json")) == [{"reward": 1.0}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("select 42 as answer"))
    assert json.loads(printed(capsys, "sql", "first", "--json")) == [{"answer": 42}]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("selec 1", "syntax error"),
        ("select rewrd from trajectories", "Candidate bindings"),
        ("copy steps to 'steps.csv'", "disabled by configuration"),
        ("select * from read_text('/etc/passwd')", "disabled by configuration"),
        ("", "no query"),
    ],
)
def test_sql_refuses_in_one_line(query: str, reason: str, capsys: pytest.CaptureFixture[str]):
    assert reason in refused(capsys, "sql", "first", query)


def test_the_prompt_answers_until_it_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    lines = iter(["select count(*)", "from steps;", "select nonsense;", "", "show tables;", "exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["sql", "first"]) == 0
    out, error = capsys.readouterr()
    assert "│            8 │" in out
    assert "trajectories" in out
    assert 'Referenced column "nonsense"' in error


# --- watch, check, export, grade --------------------------------------------------------------------------------------


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


def test_check_ends_with_0_when_all_is_well(capsys: pytest.CaptureFixture[str]):
    assert "nothing is missing or doubled" in printed(capsys, "check", "first")
    told = json.loads(printed(capsys, "check", "first", "--json"))
    assert told["ok"] is True
    assert told["problems"] == []
    assert told["checked"]["trajectories"] == 7 * 2 * 2 * S
    assert told["checked"]["prompts"] == len(PROMPTS) + 1


def test_check_ends_with_1_when_something_is_wrong(first: Run, capsys: pytest.CaptureFixture[str]):
    first.store.delete(layout.shard(0, 1))
    assert main(["check", first.url]) == 1
    assert f"wrong: {layout.shard(0, 1)}: is missing" in capsys.readouterr().out
    assert main(["check", first.url, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["problems"] == [{"key": layout.shard(0, 1), "problem": "is missing"}]


def test_no_command_waits_for_a_pipe_or_socket_under_the_name_of_an_object(first: Run):
    keys = {layout.shard(0, 9): "pipe", layout.sync(9): "socket", layout.event("trainer", 1, 9): "link to a pipe"}
    for key, kind in keys.items():
        put_irregular(Path(first.url) / key, cast(Kind, kind))

    def ends_with(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "flows.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        return done.returncode, done.stdout, done.stderr

    code, out, _ = ends_with("check", first.url)
    assert code == 1 and all(f"wrong: {key}: is no regular file" in out for key in keys)
    assert ends_with("sql", first.url, "select count(*) n from trajectories", "--csv")[:2] == (
        0,
        f"n\n{7 * 2 * 2 * S}\n",
    )
    assert ends_with("report", first.url)[0] == 0
    (report := Path(first.url) / layout.REPORT).unlink()
    put_irregular(report, "pipe")
    code, _, error = ends_with("report", first.url)
    assert code != 0 and f"{report} is a named pipe, where the report would be written: move it away" in error


@pytest.mark.parametrize("version", [Version(1, 1), Version(4, 2)], ids=["stored whole", "stored as a difference"])
def test_export_copies_the_files_of_a_version(
    first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: Version
):
    target = tmp_path / "policy"
    assert printed(capsys, "export", first.url, "--version", str(version.number), str(target)) == f"{target}\n"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == f"weights {version}".encode() * 20


def test_export_takes_the_newest_attempt_unless_told(first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for attempt, arguments in ((2, ()), (1, ("--attempt", "1"))):
        target = tmp_path / f"of-{attempt}"
        printed(capsys, "export", first.url, "--version", "2", *arguments, str(target))
        assert (target / "model.safetensors").read_bytes().startswith(f"weights 000002-a000{attempt}".encode())


def test_a_version_that_was_abandoned_is_exported_by_its_attempt_alone(
    first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.rmtree(Path(first.url, "versions", str(Version(3, 2))))
    assert "kept: 0, 1, 2, 4" in refused(capsys, "export", first.url, "--version", "3", str(tmp_path / "none"))
    printed(capsys, "export", first.url, "--version", "3", "--attempt", "1", str(tmp_path / "old"))
    assert (tmp_path / "old" / "model.safetensors").exists()


def test_export_refuses_what_it_cannot_do(first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    assert "not an empty folder" in refused(capsys, "export", first.url, "--version", "4", str(full))
    assert "kept: 0, 1, 2, 3, 4" in refused(capsys, "export", first.url, "--version", "9", str(tmp_path / "new"))
    assert os.listdir(full) == ["mine"]


def test_export_of_damaged_weights_leaves_nothing_behind(
    first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    Path(first.url, "versions/000002-a0002/model.safetensors").write_bytes(b"weights 000002-a0001" * 20)
    target = tmp_path / "out" / "policy"
    target.parent.mkdir()
    assert main(["export", first.url, "--version", "2", str(target)]) == 1
    assert "model.safetensors" in capsys.readouterr().err
    assert list(target.parent.iterdir()) == []


def test_grade_adds_the_reward_to_each_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    rows = [{"response": "the answer is 5", "answer": "5", "id": 1}, {"response": "it is 6", "answer": "5", "id": 2}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert main(["grade", "gsm8k", str(file)]) == 0
    out, said = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{**rows[0], "reward": 1.0}, {**rows[1], "reward": 0.0}]
    assert "mean reward 0.5" in said


def test_grade_takes_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    file.write_text(json.dumps({"response": "it is 5", "answer": "5"}) + "\n")
    assert json.loads(printed(capsys, "grade", "gsm8k", str(file), "--rule", "last-number"))["reward"] == 1.0
    assert json.loads(printed(capsys, "grade", "gsm8k", str(file), "--rule", "after-hashes"))["reward"] == 0.0
    assert json.loads(printed(capsys, "grade", "math", str(file), "--rule", "minerva"))["reward"] == 1.0
    assert json.loads(printed(capsys, "grade", "math", str(file)))["reward"] == 0.0  # without a box


@pytest.mark.parametrize("line", ["{", "[]", '{"response": "5"}', '{"response": "5", "answer": 5}'])
def test_grade_names_the_line_at_fault(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    file.write_text(f"\n{line}\n")
    assert f"{file} line 2" in refused(capsys, "grade", "gsm8k", str(file))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"response": "5", "answer": "5", "response": "6"}', "key 'response' is given more than once"),
        ("[" * 100_000, "not JSON: it is nested too deeply"),
    ],
    ids=["twice", "deep"],
)
def test_grade_says_what_is_wrong_with_a_line(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (file := tmp_path / "responses.jsonl").write_text(f"\n{line}\n")
    assert refused(capsys, "grade", "gsm8k", str(file)) == f"error: {file} line 2: {said}\n"


def test_grade_refuses_unknown_tasks_rules_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    file.write_text("")
    assert "nonsense" in refused(capsys, "grade", "nonsense", str(file))
    assert "nonsense" in refused(capsys, "grade", "gsm8k", str(file), "--rule", "nonsense")
    assert "No such file" in refused(capsys, "grade", "gsm8k", str(tmp_path / "nothing"))


def test_a_remote_run_is_looked_at_in_the_same_way(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    remote = s3_root(moto, monkeypatch)
    url = make_live_run(remote).url
    (told,) = json.loads(printed(capsys, "runs", remote, "--json"))
    assert (told["run"], told["state"], told["step"]) == ("live", "interrupted", 4)
    assert json.loads(printed(capsys, "sql", url, "select max(step) as step from steps", "--json")) == [{"step": 4}]
    assert "step 4 of 8" in printed(capsys, "watch", url, "--once")
    assert "nothing is missing or doubled" in printed(capsys, "check", url)
    assert printed(capsys, "report", url) == "live-report.html\n"
    printed(capsys, "export", url, "--version", "2", "policy")
    assert (tmp_path / "policy" / "config.json").read_text() == "{}"
    assert "runs/nobody" in refused(capsys, "check", f"{remote}/runs/nobody")


# --- run --------------------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_arithmetic_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = printed(
        capsys, "run", "quickstart", "--dry-run", "--root", str(tmp_path), "--steps", "8", "--set", "sync.every=4"
    )
    assert "32 prompts x 8 responses = 256" in out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_whether_searchers_and_trainer_go_in_step(capsys: pytest.CaptureFixture[str]):
    in_step, beside = (printed(capsys, "run", "math", "--dry-run", "--set", f"sync.lag={lag}") for lag in (2, "null"))
    assert "2 steps old from step 3 on as searchers and trainer go in step, 2 syncs apart" in in_step
    assert "initial fill" not in in_step and "initial fill" in beside


@pytest.mark.parametrize(
    ("lag", "steps", "said"),
    [
        (20, 20, "0 to 19 steps old (mean 9.5), as version 0 generates for every step"),
        (20, 21, "20 steps old from step 21 on as searchers and trainer go in step, 20 syncs apart"),
        (1, 400, "1 step old from step 2 on as searchers and trainer go in step, 1 sync apart"),
        (0, 400, "recent, on policy as searchers and trainer go in step"),
    ],
)
def test_a_dry_run_says_how_old_the_trajectories_of_steps_are(
    lag: int, steps: int, said: str, capsys: pytest.CaptureFixture[str]
):
    changes = (f"sync.lag={lag}", "sync.every=1", "sync.keep_versions=22")
    assert said in printed(capsys, "run", "quickstart", "--dry-run", "--steps", str(steps), "--set", *changes)


def test_the_description_of_a_fork_gives_the_ages_of_its_own_steps():
    fork = {"start.step": 40, "start.sync": 40, "sync.lag": 20, "sync.every": 1, "sync.keep_versions": 22}
    told = [describe.describe(preset("quickstart").replace({**fork, "training.steps": steps})) for steps in (60, 61)]
    assert "0 to 19 steps old (mean 9.5), as version 40 generates for every step" in told[0]
    assert "20 steps old from step 61 on" in told[1]


def test_a_dry_run_says_what_would_be_generated_for_nothing(capsys: pytest.CaptureFixture[str]):
    """A round has 64 prompts, a step 32 slots, and each prompt 8 responses."""

    def note(*changes: str) -> str:
        every = ("sync.lag=0", "sync.every=1", "sampling.recent_share=1")
        out = printed(capsys, "run", "quickstart", "--dry-run", "--set", *every, *changes)
        return next((line for line in out.splitlines() if line.startswith("note ")), "")

    assert "256 of the 512 responses of a round are generated for nothing" in note()
    assert "320 of the 512 " in note("training.responses_per_prompt=6", "sampling.copies=all")
    assert "256 of the 512 " in note("training.responses_per_prompt=6"), "where the different ones are drawn"
    unused = ("sync.every=2", "sync.lag=null", "sampling.recent_share=0.9", "sampling.mean_reward_between=[0,1]")
    assert [note(change) for change in unused] == [""] * 4


def test_a_dry_run_says_where_a_bound_on_age_makes_the_trainer_wait(capsys: pytest.CaptureFixture[str]):
    def said(bound: int) -> str:
        return printed(capsys, "run", "quickstart", "--dry-run", "--set", "sync.every=4", f"sampling.max_age={bound}")

    assert "the others are of at most 40 steps (sampling.max_age)" in said(40)
    assert "note" not in said(11)
    assert "reach an age of 11 steps, but sampling.max_age=10 drops them before that" in said(10)


def test_a_dry_run_says_what_a_micro_batch_is(capsys: pytest.CaptureFixture[str]):
    def said(*changes: str) -> str:
        return printed(capsys, "run", "quickstart", "--dry-run", "--set", *changes)

    assert "micro-batches  4 of at most 10 groups, never split" in said("training.groups_per_micro_batch=10")
    tokens = ("training.groups_per_micro_batch=null", "search.max_prompt_tokens=20", "search.max_response_tokens=30")
    for budget, noted in ((50, False), (49, True)):
        out = said(*tokens, f"training.tokens_per_micro_batch={budget}")
        assert f"micro-batches  whole groups with at most {budget} tokens in all; a larger group is read" in out
        assert ("a response of full length and its prompt have 50 tokens" in out) is noted


def test_a_dry_run_says_how_the_learning_rate_goes_and_what_adapters_and_layers_take(
    capsys: pytest.CaptureFixture[str],
):
    def said(*changes: str) -> str:
        return printed(capsys, "run", "quickstart", "--dry-run", "--set", *changes)

    rate = "learning rate  0.0002, "
    assert f"{rate}warmup-stable-decay (10 steps up, 190 at the peak, 200 down, " in said("training.ranks=1")
    short = ("training.steps=20", "training.decay_steps=200")
    assert f"{rate}warmup-stable-decay (10 steps up, 0 at the peak, 200 down, 0.000199 at the last" in said(*short)
    assert f"{rate}linear (10 steps up, 0 at the last step); AdamW" in said("training.schedule=linear")
    assert "never split; layers are computed again" in said("training.checkpoint_activations=true")
    assert "beside adapters with their gradients and moments" in said("model.lora_rank=4")
    assert "adapters" not in said("training.ranks=1") and "computed again" not in said("training.ranks=1")


def test_files_of_rows_that_are_not_there_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "rows-1.jsonl").write_text("{}")
    there, gone = str(tmp_path / "rows-*.jsonl"), str(tmp_path / "more-*.jsonl")
    command = ("run", "gsm8k", "--root", str(tmp_path), "--set")
    assert f"task.test: no such file, got '{gone}'" in refused(
        capsys, *command, f"task.train={there}", f"task.test={gone}"
    )
    assert "task.train: no such file, got '/no/x'" in refused(capsys, *command, "task.train=/no/x", "--dry-run")
    assert not (tmp_path / "runs").exists()
    printed(capsys, *command, f"task.train={there}", "task.test=s3://bucket/rows.jsonl", "--dry-run")


def test_a_dry_run_says_where_a_step_has_more_slots_than_there_are_prompts(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, *choosing("tries > 0", "first", "search.prompts_per_round=1"))
    assert "a step draws 32 prompts, but there are only " in out


def test_a_dry_run_fails_like_the_run_if_the_name_is_taken(root: str, capsys: pytest.CaptureFixture[str]):
    said = [refused(capsys, "run", "quickstart", "--name", "first", *more) for more in ((), ("--dry-run",))]
    assert said[0] == said[1]
    assert f"run 'first' exists already under {root}" in said[0]
    assert "run: a name of letters" in refused(capsys, "run", "quickstart", "--dry-run", "--name", "a/b")


def choosing(where: str, name: str = "first", *more: str) -> tuple[str, ...]:
    return (
        "run",
        "quickstart",
        "--dry-run",
        "--set",
        f"search.prompts_from={name}",
        f"search.prompts_where={where}",
        *more,
    )


def test_a_dry_run_tells_how_many_prompts_an_earlier_run_leaves(root: str, capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, *choosing("tries > 0", "first", "search.prompts_per_round=1"))
    tried = printed(capsys, "sql", "first", "select count(*) from difficulty where tries > 0", "--csv").split()[1]
    assert f"{tried} of the {len(PROMPTS)} prompts of {root}/runs/first: where tries > 0" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (choosing("tries > 0", "nobody"), "search.prompts_from: there is no run at "),
        (choosing("tries > 0", "ftp://x/runs/y"), "search.prompts_from: a store is a path"),
        (choosing("nonsense > 0"), "search.prompts_where: 'nonsense > 0': Binder Error: Referenced column"),
        (choosing("tries >"), "search.prompts_where: 'tries >': Parser Error"),
        (choosing("true; drop view draws"), "search.prompts_where: 'true; drop view draws': Parser Error"),
        (choosing("text in (from '/etc/hostname')"), "search.prompts_where: "),
        (choosing("tries < 0"), f"search.prompts_where: 'tries < 0' holds for 0 of the {len(PROMPTS)} prompts of "),
        (choosing("tries >= 0"), "prompts of {root}/runs/first, and a round asks 64 (search.prompts_per_round)"),
    ],
)
def test_an_earlier_run_that_cannot_choose_prompts_is_refused_by_the_setting_at_fault(
    arguments: tuple[str, ...], said: str, root: str, capsys: pytest.CaptureFixture[str]
):
    assert said.format(root=root) in refused(capsys, *arguments)


def test_a_model_with_a_damaged_file_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "added_tokens.json").write_bytes(b"[" * 100_000)
    said = refused(capsys, "run", "gsm8k", "--dry-run", "--set", f"model.path={tmp_path}")
    assert f"model.path: '{tmp_path}' holds no policy that can be trained: added_tokens.json is not readable" in said


def test_a_list_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    printed(capsys, "run", "math", "--dry-run", "--set", "task.options.levels=[3, 4]", "sync.lag=null")
    changes = ("--set", "sampling.mean_reward_between=[0.2, 0.8]")
    assert "have a mean reward between 0.2 and 0.8" in printed(capsys, "run", "quickstart", "--dry-run", *changes)
    assert "task.options.levels.0" in refused(capsys, "run", "math", "--dry-run", "--set", "task.options.levels=[7]")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nonsense",), "nonsense"),
        (("quickstart", "--set", "training.stepz=3"), "training.stepz"),
        (("quickstart", "--set", "training.steps"), "KEY=VALUE"),
        (("quickstart", "--steps", "0"), "training.steps"),
        (("math", "--set", 'task.options={"levels": [3], "levels": [4]}'), "task.options: key 'levels' is given more"),
        (("math", "--set", f"task.options={'[' * 100_000}"), "task.options"),
        (("quickstart", "--set", "sampling.recent_share=1.5"), "sampling.recent_share"),
        (("gsm8k", "--set", "model.path="), "model.path must be set, because task 'gsm8k' makes no policy"),
    ],
    ids=lambda it: str(it)[:60],
)
def test_impossible_settings_are_refused_before_anything_starts(
    arguments: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert named in refused(capsys, "run", *arguments, "--root", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
