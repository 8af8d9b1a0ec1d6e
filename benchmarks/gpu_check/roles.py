"""Run trainer, searcher and evaluator on one GPU for eight steps: all at once, and in shifts.

    python -m benchmarks.gpu_check.roles [--out FOLDER] [--small]

The policy has half a billion random weights, and learns the sums of `quickstart`. What counts is that the roles share
the GPU, that every version is adopted and scored, and that `tba check` finds nothing wrong with what they stored.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import storage
from benchmarks.gpu_check import stage
from benchmarks.gpu_check.stage import MEDIUM, SMALL
from benchmarks.science.runs import tba_command
from storage.layout import run_url

SETTINGS = {
    "training.steps": 8, "training.prompts_per_step": 4, "training.groups_per_micro_batch": 4,
    "search.prompts_per_round": 8, "search.initial_fill": 64, "sync.every": 2, "sync.checkpoint_every": 2,
    "evaluation.every": 2, "evaluation.prompts": 16, "evaluation.samples": 1, "evaluation.pass_at": "[]",
    "model.publish_dtype": "bfloat16", "model.gpu_shifts": False,
}  # fmt: skip
LIMIT = 280  # seconds of a run


def measure(small: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage.random_policy(SMALL if small else MEDIUM).snapshot().save(folder / "policy")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # this process keeps its context only
        return {
            "at once": run_roles(folder, "at-once"),
            "in shifts": run_roles(folder, "in-shifts", **{"model.gpu_shifts": True}),
        }


def run_roles(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    settings = SETTINGS | changes | {"model.path": str(folder / "policy")}
    root = ("--root", str(folder / "runs"))
    began = time.perf_counter()
    ended = told(tba_command("run", "quickstart", *root, "--name", name, changes=settings))
    seconds = round(time.perf_counter() - began, 1)
    url = run_url(str(folder / "runs"), name)
    checked = told([sys.executable, "-m", "flows.cli", "check", url])
    with storage.connect(url) as con:
        events = con.execute("select role, message from events where kind in ('engine-starts', 'failed')").fetchall()
        scored = con.execute("select step, value from evaluations where metric = 'greedy' order by step").fetchall()
    return {
        "exit_code": ended.returncode, "seconds": seconds, "scored": scored, "check": checked.returncode,
        "events": events, "error": "" if ended.returncode == 0 else ended.stderr[-2000:],
    }  # fmt: skip


def told(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, -1, str(late.stdout), f"ended after {LIMIT} seconds: {late.stderr}")


if __name__ == "__main__":
    stage.run("roles", __doc__, measure)
