"""The five examples of docs/extending.md, added to a copy of the packages and run together."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.tiny_models import tiny_folder
from tests.support.flows.roles import TINY
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "extending.md"
FILES = {
    "class WeightedRegression": "tba/objectives/weighted_regression.py",
    "class Backwards": "tba/tasks/backwards.py",
    "class Transcribed": "work/transcribed.py",
    "class SlowStore": "storage/objects/slow_store.py",
    "`tba count`": "flows/commands/count.py",
}
LINES = {
    "from tba.objectives.weighted_regression import": (
        "tba/objectives/registry.py",
        "from tba.objectives.trajectory_balance",
    ),
    '"backwards":': ("tba/tasks/registry.py", '    "quickstart":'),
    '"slow":': ("storage/objects/open_store.py", '    "s3":'),
    '"count":': ("flows/cli.py", '    "run":'),
}
"""The beginning of each single line on the page, with the file that gets the line, and the line that follows it."""


def extended(folder: Path) -> Path:
    """A copy of the packages with every file and line of the page."""
    for package in ("tba", "storage", "flows"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "work").mkdir()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for mark, name in FILES.items():
        [code] = [block for block in blocks if mark in block]
        (folder / name).write_text(code)
    for mark, (name, before) in LINES.items():
        [line] = [block for block in blocks if block.strip().startswith(mark)]
        assert line.count("\n") == 1, "one line elsewhere"
        file = folder / name
        text = file.read_text()
        assert text.count(f"\n{before}") == 1
        file.write_text(text.replace(f"\n{before}", f"\n{line}{before}"))
    return folder / "work"


def tba(work: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(work.parent), "PYTHONSAFEPATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=work, env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_the_examples_of_the_page_run_together(tmp_path: Path):
    work = extended(tmp_path / "copy")
    settings = {
        **TINY,
        "model.path": tiny_folder(tmp_path / "policy"),
        "objective.name": "weighted-regression",
        "objective.weight_cap": 5,
        "engine.name": "transcribed:Transcribed",
        "engine.options": json.dumps({"file": "responses.txt"}),
        "search.max_response_tokens": 8,
    }
    chosen = [f"{name}={value}" for name, value in settings.items()]
    root = f"slow://{tmp_path}/distant"
    tba(work, "run", "backwards", "--root", root, "--name", "first", "--steps", "4", "--set", *chosen)
    run = f"{root}/runs/first"
    counts = dict(line.split(": ") for line in tba(work, "count", run).splitlines())
    assert sum(int(count.replace(",", "")) for count in counts.values()) >= 64
    query = "select max(weight_mean) <= 5 as capped, count(weight_mean) as steps from steps"
    assert json.loads(tba(work, "sql", run, query, "--json")) == [{"capped": True, "steps": 4}]
    query = "select bool_and(answer = reverse(prompt_id)) as right, count(*) > 0 as any from prompts"
    assert json.loads(tba(work, "sql", run, query, "--json")) == [{"right": True, "any": True}]
    transcript = (work / "responses.txt").read_text().splitlines()
    assert len(transcript) >= 64 and all(">" in line for line in transcript)
    assert "weighted-regression" in tba(work, "run", "backwards", "--dry-run", "--set", *chosen)


def test_the_examples_bring_their_own_settings(tmp_path: Path):
    work = extended(tmp_path / "copy")
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "backwards", "--dry-run", "--set",
         "objective.name=weighted-regression", "objective.weight_cap=0"],
        cwd=work, env={**os.environ, "PYTHONPATH": str(work.parent)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert "objective.weight_cap must be greater than 0" in done.stderr
