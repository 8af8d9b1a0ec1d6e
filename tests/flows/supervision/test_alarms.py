"""Problems that raise no error: a supervisor reports them in events, on a terminal and to a webhook."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows.commands import watch
from flows.planning import resolve
from flows.supervision.alarms import OperatingAlarms
from flows.supervision.webhook import VARIABLE, open_webhook
from storage.local_files.free_space import fullest_disk
from storage.queries.views import connect
from storage.runs.lease_watch import Seen
from storage.runs.leases import Lease
from storage.runs.run import Run
from tba.config import AlarmsConfig
from tba.errors import ConfigError
from tests.support.flows.roles import at_work, behave, end_roles, finish
from tests.support.flows.supervised import Supervised, make_run
from tests.support.waiting import until

SOON = 0.05  # seconds


def seen(role: str, *, life: int = 1, silent_for: float = 0.0, disk_gb: float | None = None, **progress: float) -> Seen:
    lease = Lease(
        role=role, life=life, host="here", pid=1, counter=1, status="at work", progress=progress, renewed_at="",
        supervised=True, disk_gb=disk_gb, disk="/data",
    )  # fmt: skip
    return Seen(lease, silent_for)


def find(alarms: OperatingAlarms, *roles: Seen) -> list[tuple[str, str]]:
    return [(alarm.kind, alarm.of) for alarm in alarms.find({it.lease.role: it for it in roles})]


def test_a_lease_that_does_not_move_is_late_unless_late_after_is_0():
    late = seen("searcher-000", silent_for=5.1)
    assert find(OperatingAlarms(AlarmsConfig(late_after=5)), late) == [("role-late", "searcher-000")]
    assert not find(OperatingAlarms(AlarmsConfig(late_after=5)), seen("trainer", silent_for=4.9))
    assert not find(OperatingAlarms(AlarmsConfig(late_after=0)), late)


def test_a_role_that_gets_no_further_is_stalled_until_it_does_or_begins_another_life():
    alarms = OperatingAlarms(AlarmsConfig(stalled_after=SOON))
    assert not find(alarms, seen("trainer", step=3), seen("evaluator", scored=1))
    time.sleep(2 * SOON)
    assert find(alarms, seen("trainer", step=3), seen("evaluator", scored=1)) == [("role-stalled", "trainer")]
    assert not find(alarms, seen("trainer", step=4))
    time.sleep(2 * SOON)
    assert find(alarms, seen("trainer", step=4)) == [("role-stalled", "trainer")]
    assert not find(alarms, seen("trainer", step=4, life=2))
    assert not OperatingAlarms(AlarmsConfig(stalled_after=0)).find({})


@pytest.mark.parametrize(("role", "work"), [("trainer", "step"), ("searcher-000", "shards")])
def test_a_slow_role_gets_four_times_as_long_as_its_steps_took(role: str, work: str):
    alarms, pace = OperatingAlarms(AlarmsConfig(stalled_after=SOON)), 4 * SOON
    for n in range(4):
        find(alarms, seen(role, **{work: n}))
        time.sleep(pace)
    assert not find(alarms, seen(role, **{work: 4}))
    time.sleep(2 * pace)
    assert not find(alarms, seen(role, **{work: 4}))
    time.sleep(3 * pace)
    assert find(alarms, seen(role, **{work: 4})) == [("role-stalled", role)]


def test_a_slow_searcher_may_adopt_versions_later():
    alarms, pace = OperatingAlarms(AlarmsConfig(adopted_within=SOON)), 4 * SOON
    for n in range(4):
        find(alarms, seen("trainer", version=n), seen("searcher-000", version=n, shards=n))
        time.sleep(pace)
    late = seen("trainer", version=4), seen("searcher-000", version=3, shards=4)
    assert not find(alarms, *late)
    time.sleep(2 * pace)
    assert not find(alarms, *late)
    time.sleep(3 * pace)
    assert find(alarms, *late) == [("version-not-adopted", "searcher-000")]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_searcher_that_adopts_no_newer_version_in_time_is_reported(lag: int):
    alarms = OperatingAlarms(AlarmsConfig(adopted_within=SOON), lag=lag)
    trainer, old = seen("trainer", version=5 + lag), ("version-not-adopted", "searcher-001")
    fresh = seen("searcher-000", version=5)
    assert not find(alarms, trainer, fresh, seen("searcher-001", version=4))
    time.sleep(2 * SOON)
    assert find(alarms, trainer, fresh, seen("searcher-001", version=4)) == [old]
    assert not find(alarms, trainer, fresh, seen("searcher-001", version=4.5)), "it took one meanwhile"
    time.sleep(2 * SOON)
    assert find(alarms, trainer, fresh, seen("searcher-001", version=4.5)) == [old]
    assert not find(alarms, trainer, fresh, seen("searcher-001", version=5))


def test_a_disk_that_fills_is_reported_once_per_machine():
    alarms = OperatingAlarms(AlarmsConfig(disk_gb=2))
    assert find(alarms, seen("trainer", disk_gb=1.9), seen("searcher-000", disk_gb=1.9)) == [("disk-filling", "here")]
    assert not find(alarms, seen("trainer", disk_gb=2.1), seen("searcher-000"))


def test_the_free_space_of_the_fullest_disk_is_found(tmp_path: Path):
    run = make_run(tmp_path)
    found = fullest_disk(run.folder)
    assert 0 < found.get("disk_gb", 0.0) < 1e6 and Path(found.get("disk", "")).is_dir()


# --- real roles -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    changes = {"alarms.late_after": 1.0, "alarms.stalled_after": 1.5, "alarms.disk_gb": 1e6, "limits.silent_after": 8.0}
    run = make_run(tmp_path, changes)
    yield run
    end_roles(run)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Yield the list of messages that reach $TBA_WEBHOOK. The first request fails."""
    found: list[dict[str, Any]] = []
    requests: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(self.path)
            self.send_response(503 if len(requests) == 1 else 204)
            self.end_headers()
            if len(requests) > 1:
                found.append(json.loads(body))

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{server.server_port}/hooks/secret")
    yield found
    server.shutdown()
    server.server_close()
    assert set(requests) == {"/hooks/secret"}


def test_silence_is_told_everywhere_while_it_lasts_and_when_it_is_over(
    run: Run, heard: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
):
    behave(run, "searcher-000", "stuck")
    behave(run, "evaluator", "warn")
    supervised = Supervised(run)
    at_work(run, "trainer", "evaluator", "searcher-001")
    until(lambda: supervised.said("role-stalled", "searcher-000"))
    behave(run, "searcher-001", "hang")
    until(lambda: supervised.said("role-late", "searcher-001"))
    assert not supervised.said("role-silent", "searcher-001"), "it is told of before anything is done about it"
    until(lambda: supervised.said("step-skipped"))
    watch.watch(run, once=True, every=1.0)
    shown = capsys.readouterr().out
    assert "! disk-filling" in shown and "! role-late: searcher-001" in shown
    behave(run, "searcher-001", "work")
    until(lambda: any(event.severity == "info" for event in supervised.said("role-late", "searcher-001")), within=30)
    finish(run)
    assert supervised.ended() is None

    rows = connect(run).execute("select kind, about, severity, ended_at is null from alarms").fetchall()
    assert ("role-late", "searcher-001", "warning", False) in rows
    assert [kind for kind, *_ in rows].count("disk-filling") == 1
    assert ("step-skipped", "evaluator: step 3 is not finite") in {(e.kind, e.message) for e in supervised.events}
    told = {(it["kind"], it["severity"]) for it in heard}
    assert told >= {
        ("disk-filling", "error"), ("role-late", "warning"), ("role-late", "info"), ("role-stalled", "warning"),
        ("step-skipped", "warning"), ("run-finished", "info"),
    }  # fmt: skip
    assert not told & {("role-started", "info"), ("supervisor-started", "info")}
    assert all(it["run"] == "r" and it["text"] == f"r: {it['message']}" for it in heard)
    assert not [path for path in Path(run.url).rglob("*") if path.is_file() and b"hooks/secret" in path.read_bytes()]


def test_a_webhook_that_redirects_is_reported_and_the_redirect_is_not_followed(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    asked: list[str] = []

    class Moved(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(f"POST {self.path}")
            self.send_response(301)
            self.send_header("Location", "/new/secret")
            self.end_headers()

        def do_GET(self) -> None:
            asked.append(f"GET {self.path}")
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    monkeypatch.setattr("flows.supervision.webhook.FIRST_DELAY", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Moved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{server.server_port}/old/secret")
        with open_webhook(run) as webhook:
            webhook.tell("run-failed", "…", "error", {})
        server.shutdown()
    assert set(asked) == {"POST /old/secret"}
    assert "answers 301, a redirect" in caplog.text and "secret" not in caplog.text


def test_a_webhook_that_does_not_answer_is_reported_once_and_without_its_address(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:1/hooks/secret")
    monkeypatch.setattr("flows.supervision.webhook.FIRST_DELAY", 0.01)
    with open_webhook(run) as webhook:
        for _ in range(3):
            webhook.tell("run-failed", "…", "error", {})
    assert len(caplog.records) == 1 and "secret" not in caplog.text and VARIABLE in caplog.text


@pytest.mark.parametrize(
    "address", ["file:///etc/passwd", "hooks.example.com/x", "https:///hooks", "http://[bad/x", "http://x:y/"]
)
def test_an_invalid_address_is_refused_without_being_shown(run: Run, monkeypatch: pytest.MonkeyPatch, address: str):
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(ConfigError, match=rf"\${VARIABLE}: .*http") as found:
        open_webhook(run)
    assert address not in str(found.value)
    with pytest.raises(ConfigError, match=rf"\${VARIABLE}"):  # before there is a run
        resolve.resolve("quickstart")
