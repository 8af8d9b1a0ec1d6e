"""Where a trainer's metrics go besides the ledger: to Weights & Biases if asked, else nowhere.

The ledger's `steps` are the truth; W&B shows a view of it. One process of the run speaks to W&B, a child of the trainer
(storage/metrics/wandb_writer.py), so that neither a slow network nor any failure there reaches a gradient step. A
resumed trainer takes steps again, so W&B may show a step twice; its axis is `trainer/step`, never the order of arrival.
"""

import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Protocol, cast

from storage.runs.run import Run

log = logging.getLogger(__name__)

_WAITING = 10_000  # lines that may wait for W&B before further ones are dropped


class Settings(Protocol):
    """The part of a run's settings that says where metrics go."""

    @property
    def wandb(self) -> str: ...

    @property
    def wandb_project(self) -> str: ...


def open_metric_log(run: Run, settings: Settings) -> "WandbMetrics | NoMetrics":
    """Never raises: a W&B that cannot be had is a warning."""
    if settings.wandb == "off":
        return NoMetrics()
    try:
        return WandbMetrics(run, project=settings.wandb_project, mode=settings.wandb)
    except OSError as error:
        log.warning("wandb cannot be started, the run goes on without it: %s", error)
        return NoMetrics()


class NoMetrics:
    """The ledger is enough."""

    def write(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class WandbMetrics:
    """Feeds the process that speaks to W&B. `write` never waits; `close` waits for at most `patience` seconds."""

    def __init__(self, run: Run, *, project: str, mode: str, patience: float = 30.0):
        self.patience = patience
        command = [sys.executable, "-m", "storage.metrics.wandb_writer", run.url, project, mode, str(patience)]
        # In a session of its own, a Ctrl-C meant for the run does not reach it before the last metrics do.
        self._writer = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._queue: queue.Queue[str | None] = queue.Queue(_WAITING)
        self._dropped = 0
        pipe = cast(IO[str], self._writer.stdin)
        self._thread = threading.Thread(target=self._feed, args=(pipe,), name="metrics", daemon=True)
        self._thread.start()

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._thread.is_alive():  # else the writer is gone, and has said why
            try:
                self._queue.put_nowait(json.dumps({"step": step, "metrics": dict(metrics)}))
            except queue.Full:
                self._dropped += 1

    def close(self) -> None:
        """Hand over what is waiting; a writer that cannot get rid of it in time is ended."""
        try:
            self._queue.put_nowait(None)
            self._writer.wait(self.patience)
        except (queue.Full, subprocess.TimeoutExpired):
            log.warning("wandb: not finished after %.0f s, left alone", self.patience)
            self._writer.kill()
            self._writer.wait()
        self._thread.join(1.0)
        if self._dropped:
            log.warning("wandb: %d steps were dropped; the ledger has them all", self._dropped)

    def _feed(self, pipe: IO[str]) -> None:
        """The thread: lines into the pipe until there are no more, or nobody reads them."""
        try:
            while (line := self._queue.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()
        except OSError:
            return
        finally:
            try:
                pipe.close()
            except OSError:  # what could not be written before the reader went
                log.debug("wandb: the pipe was closed with lines in it")
