"""Metrics reach W&B if this is configured, and failures there never affect the trainer.

A trainer is a process here, so that what it leaves behind when it ends is part of the test.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli import main
from storage.metrics.metric_log import NoMetrics, open_metric_log
from storage.queries.views import connect
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.types import Score, Version
from tests.support.storage.synthetic import make_run
from tests.support.storage.wandb_files import history, stored

SCRIPT = """
import sys
from storage.metrics.metric_log import WandbMetrics
from storage.runs.run import Run

log = WandbMetrics(Run.open(sys.argv[1]), project="tests", mode=sys.argv[2], patience=float(sys.argv[3]))
for step in map(int, sys.argv[4:]):
    log.write({"loss": 1 / step, "seconds_wait": 0.1, "something_new": step}, step=step)
log.close()
print("the trainer goes on")
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(str(tmp_path), "first", config={"task": {"name": "addition"}}, sampler_sql="", code_version="")


def train(run: Run, mode: str, *steps: int, patience: float = 30.0, **environment: str) -> str:
    """Run a trainer that only writes metrics, and return its standard error."""
    arguments = [run.url, mode, str(patience), *map(str, steps)]
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "DO_NOT_TRACK": "1", "WANDB_API_KEY": "0" * 40}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**variables, "HOME": str(Path(run.url).parent), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the trainer goes on\n")
    return done.stderr


def sessions(run: Run) -> list[Path]:
    return sorted(Path(run.url).glob("logs/wandb/offline-run-*/*.wandb"))


def test_without_wandb_nothing_is_written(run: Run):
    log = open_metric_log(run, SimpleNamespace(wandb="off", wandb_project="tests"))
    log.write({"loss": 1.0}, step=1)
    log.close()
    assert isinstance(log, NoMetrics)
    assert not (Path(run.url) / "logs").exists()


def test_offline_metrics_are_kept_with_the_step_as_their_axis(run: Run):
    train(run, "offline", 1, 2)
    (session,) = sessions(run)
    assert history(session) == [
        {"trainer/step": 1, "loss/value": 1.0, "time/wait": 0.1, "train/something_new": 1},
        {"trainer/step": 2, "loss/value": 0.5, "time/wait": 0.1, "train/something_new": 2},
    ]
    metrics = [record.metric for record in stored(session) if record.WhichOneof("record_type") == "metric"]
    assert [(it.glob_name, it.step_metric) for it in metrics if it.step_metric] == [("*", "trainer/step")]


def test_a_later_attempt_continues_the_same_run_of_wandb(run: Run):
    train(run, "offline", 1, 2)
    train(run, "offline", 2, 3)
    told = [
        record.run
        for session in sessions(run)
        for record in stored(session)
        if record.WhichOneof("record_type") == "run"
    ]
    assert len(told) == 2
    assert len({it.run_id for it in told}) == 1
    assert {(it.project, it.display_name, it.run_group) for it in told} == {("tests", "first", "addition")}


def test_scores_are_sent_at_the_steps_of_their_versions(run: Run):
    scores = [
        Score(version=Version(number, 1), step=4 * number, metric=metric, value=number / 8, n=10, seconds=1.0)
        for number in (0, 2)
        for metric in ("greedy", "sampled")
    ]
    Evaluations(run).write(scores)
    train(run, "offline", 9)
    (session,) = sessions(run)
    assert history(session)[:2] == [
        {"trainer/step": 0, "eval/greedy": 0.0, "eval/sampled": 0.0},
        {"trainer/step": 8, "eval/greedy": 0.25, "eval/sampled": 0.25},
    ]


def test_a_folder_that_cannot_be_written_is_a_warning(run: Run):
    (Path(run.url) / "logs").write_text("in the way")
    assert "the run goes on without it" in train(run, "offline", 1, 2)


def test_a_server_that_does_not_answer_is_not_waited_for(run: Run):
    said = train(run, "online", 1, 2, patience=1.0, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "nothing more is sent" in said or "stopped" in said or "the run goes on without it" in said


def test_a_run_without_wandb_is_rebuilt_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Each step is there once, with the values of the views, even if a trainer has repeated steps."""
    for name, value in {"DO_NOT_TRACK": "1", "HOME": str(tmp_path), "TBA_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    run = make_run(str(tmp_path / "root"))
    both = [score for score in Evaluations(run).scores() if score.version == Version(2, 1)]
    Evaluations(run).write([replace(score, version=Version(2, 2), value=score.value / 2) for score in both])
    assert main(["wandb", run.url, "--project", "again"]) == 0
    told = capsys.readouterr().out.splitlines()
    (session,) = sessions(run)
    assert told[-1] == f"wandb sync {session.parent}"
    found = history(session)
    with connect(run) as con:
        steps = con.sql("select step, loss, seconds_wait from steps order by step").fetchall()
        scores = con.sql("select distinct step from evaluations order by step").fetchall()
    assert [(it["trainer/step"], it["loss/value"], it["time/wait"]) for it in found if "loss/value" in it] == steps
    assert [(it["trainer/step"],) for it in found if "eval/greedy" in it] == scores
    assert [it["eval/greedy"] for it in found if it.get("eval/greedy") and it["trainer/step"] == 4] == [0.25]
    assert [it["trainer/step"] for it in found] == sorted(it["trainer/step"] for it in found)
    assert not {"train/weights_sha256", "train/sync", "train/attempt"} & {name for it in found for name in it}
