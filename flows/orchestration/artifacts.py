"""What Prefect shows of a run: a task for each life of a role, versions, progress and the report as artifacts.

All of it is coarse, and none of it is needed: whatever Prefect's server does not take is logged and left out.
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
from flows.supervision.life import Event
from storage.runs.lease_watch import Seen
from storage.runs.run import Run
from tba.config import Config
from tba.errors import RunFailed, TBAError

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
SECONDS_LEFT = 25.0  # of the 30 s between Prefect's SIGTERM and its SIGKILL
VERSIONS_EVERY = 5.0  # seconds between two looks at what is published
PROGRESS_EVERY = 15.0


class Ending:
    """How one life of a role ended, once it has."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.message = ""
        self.is_failure = False

    def tell(self, message: str, *, is_failure: bool) -> None:
        self.message, self.is_failure = message, is_failure
        self.happened.set()


@task(name="role", task_run_name="{role}, life {life}", cache_policy=NO_CACHE, persist_result=False)
def role_life(role: str, life: int, ending: Ending) -> str:
    """Shows from when to when a role lived. The process is the supervisor's; this only waits."""
    while not ending.happened.wait(0.5):
        pass
    if ending.is_failure:
        raise RunFailed(ending.message)
    return ending.message


class Reports:
    """Tells Prefect what happens in a run. A context that outlasts the supervisor's: it also hears how that ended."""

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
        """For the supervisor's thread."""
        self.seen = seen

    def hear(self, event: Event | None) -> None:
        """For the flow's own thread, the only one that speaks to the server."""
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
        """All that still goes through when the flow is being ended."""
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
        """A new version of the artifact whenever a version, or a score of one, has come."""
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
        """For automations of Prefect."""
        resource = {"prefect.resource.id": f"tba.run.{self.run.name}", "prefect.resource.name": self.run.url}
        told = {**event.data, "severity": event.severity, "message": event.message}
        emit_event(f"tba.{event.kind}", resource, payload=told)

    def attempt(self, show: Callable[[], Any]) -> None:
        try:
            show()
        except TBAError as error:
            self.logger.warning("not shown: %s", error)
        except Exception as error:  # Prefect's and its client's are of many kinds; a run does not depend on being shown
            self.logger.warning("Prefect did not take a report: %s: %s", type(error).__name__, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """No task is left waiting, whatever happened."""
        for role in list(self.lives):
            self.end(role, "no longer watched", is_failure=False)


def artifact_key(what: str, run: str) -> str:
    """Lower case, digits and dashes, as Prefect wants it."""
    return f"{what}-{re.sub(r'[^a-z0-9]+', '-', run.lower()).strip('-')}"
