"""The process that talks to Weights & Biases: `python -m storage.metrics.wandb_writer RUN PROJECT MODE PATIENCE`.

Metrics arrive on standard input, one JSON object per line. When the input ends, because the trainer has closed it or
died, the process finishes the W&B session. It ends at most PATIENCE seconds later.
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from storage import layout
from storage.local_files.shared_cache import cache_folder
from storage.log.ledger import NO_METRICS, read_entries
from storage.objects import records
from storage.runs.attempts import accepts, chain, stands
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.errors import StorageError
from tba.types import Score, Version

log = logging.getLogger("tba.wandb")

AXIS = "trainer/step"
_NAMES = {
    "loss": "loss/value", "log_z": "loss/log_z", "residual_abs": "loss/residual_abs", "beta": "optim/beta",
    "lr": "optim/lr", "grad_norm": "optim/grad_norm", "reward_mean": "reward/mean", "age_mean": "age/mean",
    "age_max": "age/max", "recent_share": "buffer/recent_share", "tokens": "progress/tokens",
    "log_ratio_mean": "kl/ref", "entropy": "entropy/mean",
}  # fmt: skip
_LOOK_EVERY = 30.0  # seconds between two looks for new scores
_FAILURES = 5  # number of failures in a row after which nothing more is sent to W&B


def main(arguments: list[str]) -> int:
    url, project, mode, patience = arguments
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = Run.open(url)
    try:
        session = begin(run, project, mode)
    except Exception as error:
        log.warning("wandb is not available: %s: %s; the run goes on without it", type(error).__name__, error)
        return 1
    try:
        pass_on(run, session)
    finally:
        leave_after(float(patience))
        session.finish()
    return 0


def begin(run: Run, project: str, mode: str, *, anew: str = "") -> Any:
    """Start a W&B session and return it. All attempts of the trainer use the same W&B run. A text in `anew` makes
    another W&B run, because W&B never accepts the id of a deleted run again."""
    import wandb

    session = wandb.init(
        project=project,
        id=hashlib.sha256(f"{run.url} {run.created_at}{anew}".encode()).hexdigest()[:16],
        name=run.name,
        group=run.config.get("task", {}).get("name"),
        job_type="train",
        config=run.config,
        mode="offline" if mode == "offline" else "online",
        resume="allow" if mode == "online" and not anew else None,
        dir=str(_folder(run)),
        settings=wandb.Settings(console="off", silent=True, disable_git=True),
    )
    session.define_metric(AXIS)
    session.define_metric("*", step_metric=AXIS)
    return session


def pass_on(run: Run, session: Any) -> None:
    """Send each line of standard input, and new scores of the evaluator, to W&B until the input ends. Stop earlier if
    W&B fails `_FAILURES` times in a row."""
    scores, failures = _Scores(run), 0
    for line in sys.stdin:
        message = json.loads(line)
        try:
            scores.send(session)
            session.log({AXIS: message["step"], **{_name(n): value for n, value in message["metrics"].items()}})
            failures = 0
        except Exception as error:
            failures += 1
            log.warning("wandb: %s: %s", type(error).__name__, error)
            if failures == _FAILURES:
                log.warning(
                    "wandb failed %d times in a row, nothing more is sent; the ledger has all metrics", failures
                )
                return
    scores.send(session, now=True)


def rebuild(run: Run, project: str, mode: str) -> tuple[str, int, int]:
    """Make a new W&B run of everything that the ledger and the evaluator have stored, each gradient step once. Return
    its local folder, its number of steps and its number of versions with scores. Raise StorageError if W&B is not
    available."""
    import wandb

    entries = [entry.step for sync, attempt in _closed(run) for entry in read_entries(run, sync, attempt)]
    spans, by_version = chain(run), dict[Version, list[Score]]()
    for score in Evaluations(run).scores():
        if stands(spans, score.version):
            by_version.setdefault(score.version, []).append(score)
    # Two attempts may have scored the version that the second one continues from: the later scores count.
    last = {version.number: own for version, own in sorted(by_version.items(), key=lambda pair: pair[0].order)}
    lines = [(entry["step"], _line(entry)) for entry in entries]
    lines += [(own[0].step, {f"eval/{score.metric}": score.value for score in own}) for own in last.values()]
    try:
        session = begin(run, project, mode, anew=f" {records.now()}")
    except Exception as error:
        raise StorageError(f"W&B is not available: {type(error).__name__}: {error}") from error
    for step, line in sorted(lines, key=lambda pair: pair[0]):
        session.log({AXIS: step, **line})
    folder = str(Path(session.dir).parent)
    session.finish()
    wandb.teardown()  # waits for W&B's own process, which writes the file
    return folder, len(entries), len(last)


def _closed(run: Run) -> list[tuple[int, int]]:
    """Return the syncs whose ledger is stored and counts, each with its attempt, in order."""
    spans, names = chain(run), (layout.parse_ledger(entry.key) for entry in run.store.list(layout.STEPS))
    return sorted((name.number, name.attempt) for name in names if name and accepts(spans, name))


def _line(entry: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in entry.items() if name not in NO_METRICS}
    return {_name(name): value for name, value in numbers.items() if isinstance(value, int | float)}


def leave_after(seconds: float) -> None:
    """Start a thread that ends this process after `seconds`, even if W&B has not finished."""

    def leave() -> None:
        time.sleep(seconds)
        log.warning("wandb: not finished after %.0f s, stopped; the ledger has all metrics", seconds)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


class _Scores:
    """Sends the scores that the evaluator has stored, at the gradient steps of their versions. Scores that arrive after
    the trainer has ended are not sent."""

    def __init__(self, run: Run):
        self.evaluations = Evaluations(run)
        self.sent: set[Version] = set()
        self.next_look = 0.0

    def send(self, session: Any, *, now: bool = False) -> None:
        if not now and time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + _LOOK_EVERY
        new: dict[Version, list[Score]] = {}
        with suppress(StorageError):  # try again at the next look
            if not self.evaluations.done() <= self.sent:
                for score in self.evaluations.scores():
                    new.setdefault(score.version, []).append(score)
        for version in sorted(new.keys() - self.sent, key=lambda version: version.order):
            own = new[version]
            session.log({AXIS: own[0].step, **{f"eval/{score.metric}": score.value for score in own}})
            self.sent.add(version)


def _name(metric: str) -> str:
    """Return the name that a column of `steps` has in W&B. W&B makes one panel per prefix."""
    if metric.startswith("seconds_"):
        return f"time/{metric.removeprefix('seconds_')}"
    return _NAMES.get(metric, f"train/{metric}")


def _folder(run: Run) -> Path:
    """Return the folder for W&B's files: the folder of the logs for a local run, or a folder in the cache for a remote
    run. `wandb sync` can send the files from there."""
    logs = run.store.local_path(layout.LOGS.rstrip("/"))
    folder = logs or cache_folder("wandb") / run.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # W&B's own exit hooks wait for its server
