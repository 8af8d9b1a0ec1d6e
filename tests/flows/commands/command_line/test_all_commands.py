"""All commands treat help, errors, interrupts, closed outputs and runs on S3 in the same way."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest

from benchmarks.harness.servers import Server
from flows.cli import main
from storage import layout
from storage.runs.run import Run
from tests.conftest import s3_root
from tests.support.faults.irregular import PATIENCE, Kind, put_irregular
from tests.support.flows.command_line import printed, refused
from tests.support.storage.synthetic import S, make_live_run

COMMANDS = (
    "run", "resume", "runs", "watch", "scale", "stop", "sql", "report", "check", "export", "grade", "audit", "fork",
    "compact", "import", "metrics", "wandb",
)  # fmt: skip


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
        (("metrics", "/no/such/folder"), "ROOT|RUN: there is neither a folder nor a run '/no/such/folder'"),
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
