import logging
import os
import signal
from pathlib import Path

import pytest

from flows.roles import role
from flows.supervision.processes import FAILED, FINISHED, LOG_FORMAT
from flows.supervision.role_keeper import ERROR_LINE
from storage.runs.control import change_state
from storage.runs.events import read_events
from storage.runs.leases import read_lease
from storage.runs.run import Run
from tba.presets import preset
from tests.support.faults.uploads import begin_upload

LEFT = ["a/object", "trajectories/searcher=003/a"]


@pytest.mark.parametrize(("name", "swept"), [("trainer", LEFT), ("searcher", LEFT[1:])])
def test_a_role_begins_by_removing_what_killed_writers_have_left_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, swept: list[str]
):
    config = preset("quickstart").to_dict()
    run = Run.create(str(tmp_path), "r", config=config, sampler_sql="select 1", code_version="test")
    monkeypatch.setattr(role, "work", lambda *_, **__: None)
    for key in LEFT:
        begin_upload(run.store, key)
        path = Path(run.url) / key
        os.utime(path.with_name(f".{path.name}.0123456789ab"), (0, 0))
    change_state(run, desired="run", searchers=4, why="started")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert role.live(name, 3, run) == FINISHED
    finally:
        signal.signal(signal.SIGTERM, before)
    told = [event["data"]["keys"] for event in read_events(run) if event["kind"] == "swept"]
    assert told == [swept]
    assert run.store.unfinished() == [key for key in LEFT if key not in swept]


def test_an_unexpected_exception_is_the_last_error_that_a_role_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def work(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nothing to divide by")

    config = preset("quickstart").to_dict()
    run = Run.create(str(tmp_path), "r", config=config, sampler_sql="select 1", code_version="test")
    monkeypatch.setattr(role, "work", work)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with caplog.at_level(logging.INFO):
            assert role.live("evaluator", 0, run) == FAILED
    finally:
        signal.signal(signal.SIGTERM, before)
    lease = read_lease(run, "evaluator")
    assert lease and lease.status == "failed"
    form = logging.Formatter(LOG_FORMAT)
    log = [form.format(record) for record in caplog.records]
    assert "Traceback" in "\n".join(log)
    assert ERROR_LINE.findall("\n".join(log))[-1] == "ZeroDivisionError: nothing to divide by"
    assert log[-1].endswith(" tba ERROR ZeroDivisionError: nothing to divide by")
