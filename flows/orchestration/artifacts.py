"""Show a run in Prefect: a task run for each life of a role, and artifacts with versions, progress and the report.

A run does not depend on any of this. If Prefect's server refuses a report, the refusal is logged and the run goes on.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from prefect import task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.logging import get_run_logger

from flows.pages.markdown import Publications, markdown
from flows.supervision.interfaces import Event
from storage.runs.lease_watch import Seen
from storage.runs.run import Run
from tba.config import Config
from tba.errors import RunFailed, TBAError

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
SECONDS_LEFT = 25.0  # seconds for a stop in order; Prefect sends SIGKILL 30 s after SIGTERM
VERSIONS_EVERY = 5.0  # seconds between two looks for new versions and scores
PROGRESS_EVERY = 15.0  # seconds between two updates of the progress artifact


class Ending:
    """Says how one life of a role ended, once `happened` is set."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.message = ""
        self.is_failure = False

    def tell(self, message: str, *, is_failure: bool) -> None:
        self.message, self.is_failure = message, is_failure
        self.happened.set()


@task(name="role", task_run_name="{role}, life {life}", cache_policy=NO_CACHE, persist_result=False)
def role_life(role: str, life: int, ending: Ending) -> str:
    """Show in Prefect from when to when one life of a role lasted. This task only waits until `ending` has happened:
    the supervisor runs the role."""
    while not ending.happened.wait(0.5):
        pass
    if ending.is_failure:
        raise RunFailed(ending.message)
    return ending.message


class Reports:
    """Reports to Prefect what happens in a run. This context surrounds the context of the supervisor, so it also
    reports how the supervisor ended."""

    def __init__(self, run: Run, config: Config):
        self.run, self.steps = run, config.training.steps
        self.logger = get_run_logger()
        self.publications = Publications(run)
        self.seen: Mapping[str, Seen] = {}
        self.lives: dict[str, Ending] = {}
        self.shown: list[dict[str, Any]] = []
        self.progress: UUID | None = None
        self.next_versions = self.next_progress = 0.0

    def look(self, seen: Mapping[str, Seen]) -> None:
        """Take the current leases. Called in the supervisor's thread."""
        self.seen = seen

    def hear(self, event: Event | None) -> None:
        """Report an event if there is one, and update the artifacts when it is time. Called in the flow's own thread,
        the only one that talks to Prefect's server."""
        if event:
            self.log(event)
            if event.kind in ("role-started", "role-adopted"):
                self.begin(event.data["of"], event.data["life"])
            if event.is_more_than_news:
                self.attempt(partial(self.emit, event))
        if time.monotonic() >= self.next_versions:
            self.attempt(self.show_versions)
            self.next_versions = time.monotonic() + VERSIONS_EVERY
        if time.monotonic() >= self.next_progress:
            self.attempt(self.show_progress)
            self.next_progress = time.monotonic() + PROGRESS_EVERY

    def log(self, event: Event) -> None:
        """Log an event. If the event says that a role has ended, also set the final state of the role's task run in
        Prefect. This works even while the flow is being cancelled."""
        self.logger.log(LEVELS[event.severity], event.message)
        if event.kind == "role-ended":
            self.end(event.data["of"], event.message, is_failure=event.severity != "info")

    def finish(self) -> None:
        for show in (self.show_versions, self.show_progress, self.show_report):
            self.attempt(show)

    def begin(self, role: str, life: int) -> None:
        self.end(role, "replaced", is_failure=False)
        ending = self.lives[role] = Ending()
        self.attempt(lambda: role_life.submit(role, life, ending))

    def end(self, role: str, message: str, *, is_failure: bool) -> None:
        if role in self.lives:
            self.lives.pop(role).tell(message, is_failure=is_failure)

    def show_versions(self) -> None:
        """Update the table of versions if there is a new version or a new score."""
        rows = [published.row() for published in self.publications.all()]
        if rows and rows != self.shown:
            self.shown = rows
            create_table_artifact(rows, key=artifact_key("versions", self.run.name), description=self.run.url)

    def show_progress(self) -> None:
        trainer = self.seen.get("trainer")
        step = int(trainer.lease.progress.get("step", 0)) if trainer else 0
        told = ", ".join(f"{name}: {seen.lease.status}" for name, seen in sorted(self.seen.items()))
        percent = min(100.0, 100.0 * step / self.steps)
        if self.progress is None:
            key = artifact_key("progress", self.run.name)
            made = create_progress_artifact(percent, key=key, description=told)
            self.progress = made if isinstance(made, UUID) else None
        else:
            update_progress_artifact(self.progress, percent, description=told)

    def show_report(self) -> None:
        create_markdown_artifact(
            markdown(self.run), key=artifact_key("report", self.run.name), description=self.run.url
        )

    def emit(self, event: Event) -> None:
        """Emit the event in Prefect, where automations can react to it."""
        resource = {"prefect.resource.id": f"tba.run.{self.run.name}", "prefect.resource.name": self.run.url}
        told = {**event.data, "severity": event.severity, "message": event.message}
        emit_event(f"tba.{event.kind}", resource, payload=told)

    def attempt(self, show: Callable[[], Any]) -> None:
        try:
            show()
        except TBAError as error:
            self.logger.warning("could not be shown in Prefect: %s", error)
        except Exception as error:  # Prefect and its client raise many kinds; a run does not depend on being shown
            self.logger.warning("Prefect refused a report: %s: %s", type(error).__name__, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all task runs that still wait."""
        for role in list(self.lives):
            self.end(role, "no longer watched", is_failure=False)


def artifact_key(what: str, run: str) -> str:
    """Return the key of an artifact: lower-case letters, digits and dashes, as Prefect demands."""
    return f"{what}-{re.sub(r'[^a-z0-9]+', '-', run.lower()).strip('-')}"
