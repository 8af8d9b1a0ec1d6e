"""Make stored runs, which are kept as data: one version of this program wrote them, and every later one must read them.

    python -m tests.make_stored_run tests/data/NAME

makes a root with two runs, and beside them `expected.json`: the results of queries, `tba check` and the draws of each
step at that time. tests/test_stored_runs.py compares them with the current results, for every folder under tests/data.
A folder is never changed or made again. If a version of the program stores something else, it adds its own folder,
named after that version.

`whole` is trained by real roles on a policy of a few hundred weights. Its first trainer dies in step 7, after the
checkpoint of step 4 and the ledger of step 6. The second trainer takes steps 5 and 6 again and finishes. Searcher 0
lives for one round at a time, and its last round still waits for a record. A shard of searcher 1 is truncated and
refused. Some versions and a checkpoint are given up, and the remaining versions are evaluated. `replayed` is a fork
that replays the records of `whole`, with a sync at every step from step 8 on. Its trainer dies in step 10.

Nothing shows where or by whom the runs were made: host and process are made up, paths are relative, leases are removed.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb
import torch

import storage
from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from flows.commands import fork
from flows.planning import create, resolve
from flows.roles import wiring
from storage import layout
from storage.maintenance.check import check
from storage.runs.control import change_state
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from tba.config import parse
from tba.errors import Stopped
from tba.models.policy import Policy

CHARACTERS = "0123 +=?"
PROBLEMS = {"train": [(0, 1), (1, 1), (0, 2), (1, 2), (3, 0), (0, 0), (1, 0), (2, 1)], "test": [(2, 0), (0, 3)]}
SETTINGS = {
    "seed": 2,  # with this seed, rewards differ within groups from step 1 on; else gradients are rounding errors
    "model.path": "policy",
    "model.threads": 1,
    "model.publish_dtype": "float32",
    "task.train": "train.jsonl",
    "task.test": "test.jsonl",
    "search.searchers": 2,
    "search.prompts_per_round": 4,
    "search.responses_per_prompt": 4,
    "search.max_prompt_tokens": 64,
    "search.max_response_tokens": 4,
    "search.initial_fill": 16,
    "sampling.capacity": 12,
    "sampling.recent_share": 0.5,
    "sampling.inv_temp": 1.0,
    "objective.beta_start": 0.5,
    "objective.beta_end": 0.5,
    "objective.beta_target": 1,
    "objective.beta_stop": 1,
    "training.steps": 10,
    "training.prompts_per_step": 2,
    "training.responses_per_prompt": 4,
    "training.groups_per_micro_batch": 2,
    "training.learning_rate": 1e-2,
    "training.adam_eps": 1e-4,
    "training.schedule": "constant",
    "training.warmup_steps": 0,
    "training.decay_steps": 0,
    "sync.every": 2,
    "sync.checkpoint_every": 2,
    "sync.keep_checkpoints": 2,
    "sync.keep_versions": 2,
    "evaluation.every": 3,
    "evaluation.samples": 1,
}

SOME = {
    "trajectories": "where slot = 0",
    "groups": "where prompt_id = 'train-00000'",
    "draws": "where position = 0",
    "draws_all": "where position = 0",
}
"""Views for which expected.json has only these rows. It has the number of rows of every view."""


class Dies(BaseException):
    """End a role like a killed process."""


class ToldLease(HeldLease):
    """A lease that calls `heard` with each new progress of the role, in the role's own thread."""

    heard: Callable[[HeldLease, dict[str, float]], None]
    told: dict[str, float] | None = None

    def tell(self, status: str, **progress: float) -> None:
        super().tell(status, **progress)
        if progress != self.told:
            self.told = progress
            self.heard(self, progress)


def live(run: Run, name: str, role: Callable[..., None], *arguments: int, heard: Callable[..., None]) -> None:
    """Run one life of a role."""
    hearing = type("HearingLease", (ToldLease,), {"heard": staticmethod(heard)})
    with hearing(run, name, every=60.0) as lease:
        events = Events(run, name, lease.life)
        try:
            role(run, *arguments, lease, events)
        except Stopped as stopped:
            events.write("stopped", str(stopped))
        except Dies:
            pass


def search(run: Run) -> None:
    """Run one round of searcher 0."""

    def heard(lease: HeldLease, told: dict[str, float]) -> None:
        if "round" in told:
            lease.stop("one round is enough")

    live(run, "searcher-000", wiring.run_searcher, 0, heard=heard)


def train(run: Run, *, rounds: bool, dies_in: int = 0) -> None:
    """Run a life of the trainer. With `rounds`, a round of the searcher arrives before each record."""
    config = parse(run.config)

    def heard(_: HeldLease, told: dict[str, float]) -> None:
        step = int(told.get("step", 0))
        if step and step == dies_in:
            raise Dies
        if rounds and (told.get("arrived") == 0 or (step and step % config.sync.every == 1)):
            search(run)

    live(run, "trainer", wiring.run_trainer, heard=heard)


def make(root: Path) -> None:
    """Make both runs under a root. The working directory has the policy and the data."""
    whole = create.start(resolve.resolve("gsm8k", SETTINGS), str(root), "whole")
    whole.store.create(layout.shard(1, 0), b"PAR1 and no more")
    train(whole, rounds=True, dies_in=7)
    train(whole, rounds=True)
    search(whole)
    live(whole, "evaluator", wiring.run_evaluator, heard=lambda lease, told: None)
    change_state(whole, desired="stop", why="finished")
    replayed = fork.fork(whole, 8, {"sync.every": "1"}, name="replayed", replay=True)
    train(replayed, rounds=False, dies_in=10)


def expected(run: Run) -> dict[str, Any]:
    """Return what every later version must find in a run."""
    with storage.connect(run) as con:
        answers = [{"query": query, "rows": answer(con, query)} for query in queries(con)]
    return {"checked": check(run).checked, "drawn": drawn(run), "answers": answers}


def queries(con: duckdb.DuckDBPyConnection) -> list[str]:
    """Return queries for the current columns of each view, by name, because later versions may have more columns."""
    found = []
    for (view,) in con.execute("show tables").fetchall():
        columns = ", ".join(row[0] for row in con.execute(f"describe {view}").fetchall())
        found.append(f"select count(*) from {view}")
        found.append(f"select {columns} from {view} {SOME.get(view, '')} order by all")
    return found


def answer(con: duckdb.DuckDBPyConnection, query: str) -> list[str]:
    """Return each row as JSON."""
    return [json.dumps(row, default=str, ensure_ascii=False) for row in con.execute(query).fetchall()]


def drawn(run: Run) -> dict[str, str]:
    """Return the drawn trajectories of the ledger by step, in the order of slots and positions."""
    with storage.connect(run) as con:
        rows = con.execute("select step, trajectory_id from draws order by step, slot, position").fetchall()
    return {str(step): " ".join(row[1] for row in same) for step, same in groupby(rows, key=lambda row: row[0])}


def write_inputs() -> None:
    """Write the base policy and the problems to the working directory."""
    model = tiny_llama(characters=CHARACTERS, width=8, layers=1)
    Policy(model, tiny_tokenizer(CHARACTERS), torch.device("cpu")).snapshot().save(Path("policy"))
    for split, problems in PROBLEMS.items():
        lines = [json.dumps({"question": f"{a}+{b}=?", "answer": f"#### {a + b}"}) for a, b in problems]
        Path(f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def main(folder: str) -> None:
    target = Path(folder).absolute()
    target.mkdir(parents=True)
    socket.gethostname, os.getpid = (lambda: "host"), (lambda: 1)
    create.code_version = lambda: version("tba")
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_inputs()
        make(Path("root"))
        runs = {name: Run.open(f"root/runs/{name}") for name in ("whole", "replayed")}
        found = {name: expected(run) for name, run in runs.items()}
        for name, run in runs.items():
            shutil.copytree(run.url, target / "runs" / name, ignore=shutil.ignore_patterns("roles", "probe", ".lock"))
        (target / "expected.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        os.chdir(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
