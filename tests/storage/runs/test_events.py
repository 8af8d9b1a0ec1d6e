"""Events: small records of what happened."""

import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest

from storage import layout
from storage.objects.store import Entry
from storage.runs import events as events_module
from storage.runs.events import EventReader, Events, read_events
from storage.runs.run import Run
from tba.types import Version
from tests.support.storage.synthetic import put
from tests.support.waiting import until

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def test_events_are_read_in_the_order_they_happened(run: Run):
    trainer, searcher = Events(run, "trainer", 1), Events(run, "searcher-000", 2)
    trainer.write("started", "hello")
    searcher.write("adopted", "version 3", version=Version(3, 1), loss=0.5)
    trainer.write("failed", "no more", severity="error", where=Path("x"))
    events = read_events(run)
    assert [event["kind"] for event in events] == ["started", "adopted", "failed"]
    assert [event["seq"] for event in events] == [0, 0, 1]
    assert events[1]["data"] == {"version": [3, 1], "loss": 0.5}
    assert events[2]["severity"] == "error"
    assert run.store.exists(layout.event("searcher-000", 2, 0))


@local
def test_events_of_several_threads_and_writers_all_stand(run: Run):
    writers = [Events(run, "supervisor", 1), Events(run, "supervisor", 1)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: writers[n % 2].write("tick", str(n)), range(40)))
    assert sorted(int(event["message"]) for event in read_events(run)) == list(range(40))


@local
def test_who_adopts_a_version_does_not_wait_for_the_store(run: Run, monkeypatch: pytest.MonkeyPatch):
    may, create = threading.Event(), run.store.create

    def slowly(key: str, data: bytes) -> None:
        may.wait(30)
        create(key, data)

    monkeypatch.setattr(run.store, "create", slowly)
    events = Events(run, "searcher-000", 1)
    events.write("version-adopted", "searcher 0 adopts 000001-a0001")
    assert read_events(run) == []
    may.set()
    events.write("version-refused", "it is damaged", severity="error")
    until(lambda: [event["kind"] for event in read_events(run)] == ["version-adopted", "version-refused"])


@local
def test_numbers_that_are_not_finite_do_not_spoil_a_record(run: Run):
    Events(run, "trainer", 1).write("failed", "the loss is nan", loss=math.nan, norms=[1.0, math.inf])
    assert read_events(run)[0]["data"] == {"loss": None, "norms": [1.0, None]}
    files = f"{run.url}/{layout.EVENTS}*/*.json"
    assert duckdb.sql(f"select kind from read_json('{files}')").fetchall() == [("failed",)]


@local
def test_data_that_json_does_not_know_does_not_spoil_a_record(run: Run):
    circle: dict[str, object] = {}
    circle["itself"] = circle
    Events(run, "trainer", 1).write("odd", "hello", ages={(1, 2): 3}, circle=circle)
    assert read_events(run)[0]["data"] == {"ages": "{(1, 2): 3}", "circle": "{'itself': {...}}"}


@local
def test_what_is_no_event_is_passed_over(run: Run):
    Events(run, "trainer", 1).write("started", "hello")
    put(run, "events/notes.txt", b"x")
    assert len(read_events(run)) == 1


@local
def test_one_that_is_damaged_keeps_nobody_from_the_others_and_is_spoken_of_once(
    run: Run, caplog: pytest.LogCaptureFixture
):
    for number, data in enumerate(
        (b'{"at"', b"[]", b'{"at": 3, "role": "x", "kind": "", "severity": "", "message": ""}')
    ):
        put(run, f"events/searcher-000/0001-00000{number}.json", data)
    reader, trainer = EventReader(run), Events(run, "trainer", 1)
    for kind in ("started", "reward-collapsed"):
        trainer.write(kind, "hello", severity="warning")
        assert [event["kind"] for event in reader.new()] == [kind]
    assert sum("an event is skipped" in record.message for record in caplog.records) == 3


@local
def test_trouble_with_the_store_is_logged_not_raised(run: Run, caplog: pytest.LogCaptureFixture):
    (Path(run.url) / "events").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        Events(run, "trainer", 1).write("started", "hello")
    assert "started was not stored" in caplog.text


@local
def test_a_look_lists_only_what_is_new_once_there_are_many_events(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events_module, "LISTED_AT_ONCE", 10)
    monkeypatch.setattr(events_module, "LATE", 3)
    writers = [Events(run, "trainer", 1), Events(run, "searcher-000", 1), Events(run, "searcher-000", 2)]
    for writer in writers:
        for number in range(20):
            writer.write("tick", f"{writer.role} {writer.life} {number}")
    reader = EventReader(run)
    assert len(reader.new()) == 60
    listed: list[str] = []
    listing = run.store.list

    def counted(prefix: str = "", *, after: str = "") -> list[Entry]:
        found = listing(prefix, after=after)
        listed.extend(entry.key for entry in found)
        return found

    monkeypatch.setattr(run.store, "list", counted)
    assert reader.new() == []
    assert len(listed) == 2 * 3  # the newest of each role, in case that an older one comes late
    writers[0].write("tick", "new")
    run.store.delete(layout.event("searcher-000", 2, 18))
    assert [event["message"] for event in reader.new()] == ["new"]


@local
def test_an_event_that_is_stored_after_newer_ones_is_read(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events_module, "LISTED_AT_ONCE", 1)
    writer, reader = Events(run, "trainer", 1), EventReader(run)
    for number in range(10):
        writer.write("tick", str(number))
    late = layout.event("trainer", 1, 4)
    data = run.store.read(late)
    run.store.delete(late)
    assert len(reader.new()) == 9
    run.store.create(late, data)
    assert [event["message"] for event in reader.new()] == ["4"]
