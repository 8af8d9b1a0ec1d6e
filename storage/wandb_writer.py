"""The process that speaks to Weights & Biases: `python -m storage.wandb_writer RUN PROJECT MODE PATIENCE`.

Metrics arrive on standard input, one JSON object a line. When the input ends, because the trainer closed it or died,
the session is finished; the process never outlives that by more than PATIENCE seconds.
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from storage import layout
from storage.cache import cache_folder
from storage.evaluations import Evaluations
from storage.run import Run
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
_FAILURES = 5  # in a row, after which W&B is given up


def main(arguments: list[str]) -> int:
    url, project, mode, patience = arguments
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = Run.open(url)
    try:
        session = begin(run, project, mode)
    except Exception as error:
        log.warning("wandb is not available, the run goes on without it: %s: %s", type(error).__name__, error)
        return 1
    try:
        pass_on(run, session)
    finally:
        leave_after(float(patience))
        session.finish()
    return 0


def begin(run: Run, project: str, mode: str) -> Any:
    """One W&B run per run: later attempts of the trainer continue it."""
    import wandb

    session = wandb.init(
        project=project,
        id=hashlib.sha256(f"{run.url} {run.created_at}".encode()).hexdigest()[:16],
        name=run.name,
        group=run.config.get("task", {}).get("name"),
        job_type="train",
        config=run.config,
        mode="offline" if mode == "offline" else "online",
        resume="allow" if mode == "online" else None,
        dir=str(_folder(run)),
        settings=wandb.Settings(console="off", silent=True, disable_git=True),
    )
    session.define_metric(AXIS)
    session.define_metric("*", step_metric=AXIS)
    return session


def pass_on(run: Run, session: Any) -> None:
    """Consumes lines until there are no more; scores are looked up beside."""
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
                log.warning("wandb failed %d times in a row and is left alone; the ledger has everything", failures)
                return
    scores.send(session, now=True)


def leave_after(seconds: float) -> None:
    """End this process soon, also when W&B cannot be persuaded to."""

    def leave() -> None:
        time.sleep(seconds)
        log.warning("wandb: not finished after %.0f s, left alone", seconds)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


class _Scores:
    """What the evaluator has stored, sent at the steps of its versions. Scores that come after the trainer has ended
    are in storage alone."""

    def __init__(self, run: Run):
        self.evaluations = Evaluations(run)
        self.sent: set[Version] = set()
        self.next_look = 0.0

    def send(self, session: Any, *, now: bool = False) -> None:
        if not now and time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + _LOOK_EVERY
        new: dict[Version, list[Score]] = {}
        with suppress(StorageError):  # then at the next look
            if not self.evaluations.done() <= self.sent:
                for score in self.evaluations.scores():
                    new.setdefault(score.version, []).append(score)
        for version in sorted(new.keys() - self.sent, key=lambda version: version.order):
            own = new[version]
            session.log({AXIS: own[0].step, **{f"eval/{score.metric}": score.value for score in own}})
            self.sent.add(version)


def _name(metric: str) -> str:
    """What W&B calls a column of `steps`; groups make its panels."""
    if metric.startswith("seconds_"):
        return f"time/{metric.removeprefix('seconds_')}"
    return _NAMES.get(metric, f"train/{metric}")


def _folder(run: Run) -> Path:
    """Beside the logs of a local run; in the cache for a remote one, from where `wandb sync` sends it."""
    logs = run.store.local_path(layout.LOGS.rstrip("/"))
    folder = logs or cache_folder("wandb") / run.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # W&B's own exit hooks wait for its server
