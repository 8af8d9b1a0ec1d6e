"""Sends a trainer's metrics to Weights & Biases (W&B) if the settings say so.

The ledger is the authoritative record of metrics; W&B only shows them. A child process of the trainer
(storage/metrics/wandb_writer.py) talks to W&B, so a slow network or a failure there never affects a gradient step. A
resumed trainer repeats steps, so W&B may show a step twice. Its axis is `trainer/step`, never the order of arrival.
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

_WAITING = 10_000  # maximum number of lines that wait for W&B; further lines are dropped


class Settings(Protocol):
    """The part of a run's settings that says where metrics go."""

    @property
    def wandb(self) -> str: ...

    @property
    def wandb_project(self) -> str: ...


def open_metric_log(run: Run, settings: Settings) -> "WandbMetrics | NoMetrics":
    """Return the destination of metrics. If W&B cannot be started, log a warning and return `NoMetrics`."""
    if settings.wandb == "off":
        return NoMetrics()
    try:
        return WandbMetrics(run, project=settings.wandb_project, mode=settings.wandb)
    except OSError as error:
        log.warning("wandb cannot be started: %s; the run goes on without it", error)
        return NoMetrics()


class NoMetrics:
    """A metric log that drops everything. The ledger still has all metrics."""

    def write(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class WandbMetrics:
    """Sends metrics to the process that talks to W&B. `write` never waits; `close` waits at most `patience` seconds."""

    def __init__(self, run: Run, *, project: str, mode: str, patience: float = 30.0):
        self.patience = patience
        command = [sys.executable, "-m", "storage.metrics.wandb_writer", run.url, project, mode, str(patience)]
        # The writer gets a session of its own, so that Ctrl-C does not end it before the last metrics arrive.
        self._writer = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._queue: queue.Queue[str | None] = queue.Queue(_WAITING)
        self._dropped = 0
        pipe = cast(IO[str], self._writer.stdin)
        self._thread = threading.Thread(target=self._feed, args=(pipe,), name="metrics", daemon=True)
        self._thread.start()

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._thread.is_alive():  # otherwise the writer process has ended and has logged the reason
            try:
                self._queue.put_nowait(json.dumps({"step": step, "metrics": dict(metrics)}))
            except queue.Full:
                self._dropped += 1

    def close(self) -> None:
        """Let the writer process send the lines that still wait, and kill it if it does not finish in time."""
        try:
            self._queue.put_nowait(None)
            self._writer.wait(self.patience)
        except (queue.Full, subprocess.TimeoutExpired):
            log.warning("wandb: not finished after %.0f s, stopped; the ledger has all metrics", self.patience)
            self._writer.kill()
            self._writer.wait()
        self._thread.join(1.0)
        if self._dropped:
            log.warning("wandb: %d steps were dropped; the ledger has them all", self._dropped)

    def _feed(self, pipe: IO[str]) -> None:
        """Body of the thread `metrics`: write queued lines to the writer process until None is queued or the process
        has ended."""
        try:
            while (line := self._queue.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()
        except OSError:
            return
        finally:
            try:
                pipe.close()
            except OSError:  # the writer ended before it had read all lines
                log.debug("wandb: the pipe was closed with lines in it")
