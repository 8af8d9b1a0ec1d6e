"""The tasks that docs/tasks.md writes run as the page says: from the folder of their file."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from benchmarks.harness.tiny_models import tiny_folder
from storage.runs.run import Run
from tests.support.flows.roles import TINY

ODD = """
from carryless import Carryless


class Odd(Carryless):
    name = "odd"

    def reward(self, prompt, response):
        return super().reward(prompt, response.text)
"""
PAGE = Path(__file__).parents[4] / "docs" / "tasks.md"


def write_task(folder: Path) -> None:
    written = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert written
    (folder / "carryless.py").write_text(written[1])


def run_from(folder: Path, task: str, *options: str, **given: str) -> "subprocess.CompletedProcess[str]":
    policy = folder / "policy"
    changes = {"model.path": policy if policy.exists() else tiny_folder(policy), **TINY, **given}
    command = [str(Path(sys.executable).with_name("tba")), "run", task, "--root", "here", "--steps", "8", *options]
    for key, value in changes.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.long
@pytest.mark.slow
def test_the_task_of_the_documentation_runs_from_the_folder_of_its_file(tmp_path: Path):
    write_task(tmp_path)
    told = run_from(tmp_path, "carryless:Carryless")
    assert told.returncode == 0, told.stderr
    (folder,) = (tmp_path / "here" / "runs").iterdir()
    assert folder.name.startswith("Carryless-2")
    with storage.connect(Run.open(str(folder))) as con:
        wrong = con.execute(
            """select response, answer, reward from trajectories join prompts using (prompt_id)
            where reward <> list_sum([(response[i] = answer[i])::int for i in range(1, 4)]) / 3"""
        ).fetchall()
        parts = con.execute("select bool_and(reward_parts['digits'] = length(response)) from trajectories").fetchone()
        asked = con.execute("select split, count(*) from prompts group by 1 order by 1").fetchall()
        steps = con.execute("select count(*) from steps").fetchone()
    assert (wrong, parts, asked, steps) == ([], (True,), [("test", 256), ("train", 1024)], (8,))


@pytest.mark.long
@pytest.mark.slow
def test_the_task_over_a_file_runs_and_says_what_is_missing_without_one(tmp_path: Path):
    written = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [code] = [it for it in written if "class Questions" in it]
    (tmp_path / "questions.py").write_text(code)
    for split, first in (("train", 10), ("test", 60)):
        asked = [
            {"id": n, "question": f"{n}+{n}", "answer": str(2 * n), "unread": None} for n in range(first, first + 9)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, asked)))
    lacking = run_from(tmp_path, "questions:Questions")
    assert lacking.returncode == 1
    assert "it got no rows: set task.train to a file or dataset with rows" in lacking.stderr
    told = run_from(tmp_path, "questions:Questions", **{"task.train": "train.jsonl", "task.test": "test.jsonl"})
    assert told.returncode == 0, told.stderr
    folder = max((tmp_path / "here" / "runs").iterdir(), key=lambda it: it.stat().st_ctime)
    with storage.connect(Run.open(str(folder))) as con:
        asked = con.execute("select split, count(*), any_value(answer) from prompts group by 1 order by 1").fetchall()
    assert [(split, count) for split, count, _ in asked] == [("test", 9), ("train", 9)]


@pytest.mark.long
@pytest.mark.slow
def test_a_task_whose_reward_fails_ends_the_run_at_once_and_says_where(tmp_path: Path):
    write_task(tmp_path)
    (tmp_path / "odd.py").write_text(ODD)
    told = run_from(tmp_path, "odd:Odd")
    assert told.returncode == 1
    assert "life 2" not in told.stderr
    (ended,) = re.findall(
        r"^searcher-000, life 1, failed with exit code 2: DataError: (.*)$", told.stderr, re.MULTILINE
    )
    assert re.fullmatch(
        r"task 'odd': reward of prompt 'train \d+\+\d+=' raised AttributeError: .*carryless.py, line \d+\)", ended
    )
    (log,) = (tmp_path / "here").glob("runs/*/logs/searcher-000-0001.log")
    assert "odd.py" in log.read_text(), "the whole traceback"


def test_the_task_of_the_documentation_is_found_in_the_working_folder(tmp_path: Path):
    write_task(tmp_path)
    told = run_from(tmp_path, "carryless:Carryless", "--dry-run")
    assert told.returncode == 0, told.stderr
    assert re.search(r"^task +carryless", told.stdout, re.MULTILINE)
