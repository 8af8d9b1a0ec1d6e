"""Start and resume the runs of a study, and remove their weights when they have been measured."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import storage
from storage.layout import CHECKPOINTS, VERSIONS, run_url
from storage.runs.run import Run


def finished(root: str, name: str) -> bool:
    """If the run exists, resume it until it has finished and return True. Otherwise return False."""
    url = run_url(root, name)
    if not (Path(url) / "run.json").exists():
        return False
    tba("resume", url)
    return True


def finished_in_one_go(root: str, name: str) -> bool:
    """Return True if the run has taken all its steps without a break. Otherwise remove what there is of the run, whose
    clock went on during the break, and return False."""
    url = run_url(root, name)
    if not (Path(url) / "run.json").exists():
        return False
    with storage.connect(url) as con:
        [(lives,)] = con.execute("select count(*) from attempts").fetchall()
        [(steps,)] = con.execute("select coalesce(max(step), 0) from steps").fetchall()
    if lives == 1 and steps == Run.open(url).config["training"]["steps"]:
        return True
    shutil.rmtree(url)
    return False


def tba(*arguments: str, changes: Mapping[str, Any] | None = None) -> None:
    command = tba_command(*arguments, changes=changes)
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {told.returncode}:\n{told.stderr[-2000:]}")


def tba_command(*arguments: str, changes: Mapping[str, Any] | None = None) -> list[str]:
    changed = [f"{key}={value}" for key, value in (changes or {}).items()]
    return [sys.executable, "-m", "flows.cli", *arguments, *(["--set", *changed] if changed else [])]


def forget_weights(url: str) -> None:
    """Remove the weights of a finished run. Everything else stays."""
    for folder in (VERSIONS, CHECKPOINTS):
        shutil.rmtree(Path(url) / folder, ignore_errors=True)
