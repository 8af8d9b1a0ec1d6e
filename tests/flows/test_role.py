import logging
import signal
from pathlib import Path

import pytest

from flows import role
from flows.processes import FAILED, LOG_FORMAT
from flows.supervise import ERROR_LINE
from storage.leases import read_lease
from storage.run import Run
from tba.presets import preset


def test_what_nobody_foresaw_is_the_last_that_a_role_logs_as_an_error(
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
