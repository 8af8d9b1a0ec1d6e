"""A supervisor in a thread, over roles that follow a script."""

import threading
from pathlib import Path
from typing import Any

from flows.supervision.gpus import Devices
from flows.supervision.interfaces import Event, StopRequest
from flows.supervision.processes import LocalLauncher
from flows.supervision.supervisor import supervise
from storage.runs.control import change_state
from storage.runs.lease_watch import Seen
from storage.runs.run import Run
from tba.config import parse
from tba.presets import preset
from tests.support.flows.roles import LIMITS, script

ROLES = ("trainer", "evaluator", "searcher-000", "searcher-001")


class Supervised(threading.Thread):
    """A supervisor in a thread, with its events and the error that ended it."""

    def __init__(self, run: Run, **options: Any):
        super().__init__(daemon=True)
        self.run_ = run
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.request: StopRequest | None = None
        self.seen: dict[str, Seen] = {}
        self.options = {"launcher": LocalLauncher(run, command=script, devices=Devices(run.url, uuids=[])), **options}
        self.start()

    def run(self) -> None:
        try:
            supervise(
                self.run_,
                self.options["launcher"],
                parse(self.run_.config),
                should_stop=lambda: self.request,
                on_event=self.events.append,
                on_look=self.seen.update,
                external_trainer=self.options.get("external_trainer", False),
                first_delay=0.1,
            )
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException | None:
        self.join(40)
        assert not self.is_alive(), self.events
        return self.error

    def said(self, kind: str, of: str = "") -> list[Event]:
        return [e for e in self.events if e.kind == kind and (not of or e.data.get("of") == of)]


def make_run(root: Path, changes: dict[str, Any] | None = None) -> Run:
    config = preset("quickstart").replace({**LIMITS, "search.searchers": 2, **(changes or {})})
    run = Run.create(str(root), "r", config=config.to_dict(), sampler_sql="select 1", code_version="test")
    change_state(run, desired="run", searchers=2)
    return run
