"""Which runs a scrape shows, what it reads, and that it ends in time."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest

from flows.metrics import role_metrics, run_reader
from flows.metrics.watched import Sample, Watched
from flows.planning import run_summary
from storage import layout
from storage.objects import records
from storage.objects.local_store import LocalStore
from storage.runs.control import change_state
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run, run_urls
from tba.errors import StorageError
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import SyntheticRun, make_run
from tests.support.waiting import until

local = pytest.mark.parametrize("root", ["local"], indirect=True)
LONG = 60.0


def later(monkeypatch: pytest.MonkeyPatch, *, minutes: float) -> None:
    """Move the clock of those who read and write the times in records."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(UTC) + timedelta(minutes=minutes)

    for module in (run_reader, role_metrics, run_summary, records):
        monkeypatch.setattr(module, "datetime", Later)


def value(samples: list[Sample], name: str, **labels: str) -> float | None:
    found = [it for metric, own, it in samples if metric.name == name and labels.items() <= own.items()]
    assert len(found) < 2
    return found[0] if found else None


def test_a_root_shows_its_runs(root: str, finished: Run, live: Run):
    samples = Watched([root]).scrape(deadline=LONG)
    assert value(samples, "tba_up") == 1
    assert value(samples, "tba_root_runs") == 2
    assert value(samples, "tba_run_up", run="first") == value(samples, "tba_run_up", run="live") == 1
    assert value(samples, "tba_run_step", run="first") == 8
    assert all(own["root"] == live.root for _, own, _ in samples)


@local
def test_a_finished_run_is_not_read_again(root: str, finished: Run, monkeypatch: pytest.MonkeyPatch):
    watched = Watched([finished.url])
    first = watched.scrape(deadline=LONG)
    for name in ("read", "read_many", "list", "read_tagged"):
        monkeypatch.setattr(LocalStore, name, lambda *_, **__: pytest.fail("it was read again"))
    assert watched.scrape(deadline=LONG) == first


@local
def test_an_interrupted_run_is_read_again_once_a_role_is_alive(root: str, monkeypatch: pytest.MonkeyPatch):
    run = SyntheticRun(root, "first").begin().run
    watched = Watched([root])
    assert value(watched.scrape(deadline=LONG), "tba_run_state", state="interrupted") == 1
    with HeldLease(run, "trainer", every=3600.0):
        assert value(watched.scrape(deadline=LONG), "tba_run_state", state="running") == 1
    assert value(watched.scrape(deadline=LONG), "tba_run_state", state="interrupted") == 1


@local
@pytest.mark.parametrize("desired", ["run", "stop"])
def test_a_run_whose_roles_die_without_a_word_is_dead(
    root: str, monkeypatch: pytest.MonkeyPatch, desired: Literal["run", "stop"]
):
    """The lease is as fresh as it ever was at the last look, and nothing is written any more."""
    run = SyntheticRun(root, "first").begin().run
    watched = Watched([root])
    with HeldLease(run, "trainer", every=3600.0):
        assert value(watched.scrape(deadline=LONG), "tba_run_state", state="running") == 1
        later(monkeypatch, minutes=10)
        samples = watched.scrape(deadline=LONG)
        assert value(samples, "tba_run_state", state="interrupted") == 1
        assert value(samples, "tba_role_up", role="trainer") == 0
        assert value(samples, "tba_roles", role="trainer", state="silent") == 1
        if desired == "stop":
            change_state(run, desired="stop", why="asked to")
            assert value(watched.scrape(deadline=LONG), "tba_run_state", state="stopped") == 1


@local
def test_a_transition_is_shown_even_if_its_first_reading_failed(root: str, monkeypatch: pytest.MonkeyPatch):
    run = SyntheticRun(root, "first").begin().run
    watched, reading = Watched([run.url]), run_reader.RunReader.read
    with HeldLease(run, "trainer", every=3600.0):
        assert value(watched.scrape(deadline=LONG), "tba_run_state", state="running") == 1

    def fail(_: object) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(run_reader.RunReader, "read", fail)
    assert value(watched.scrape(deadline=LONG), "tba_run_up") == 0
    monkeypatch.setattr(run_reader.RunReader, "read", reading)
    assert value(watched.scrape(deadline=LONG), "tba_run_state", state="interrupted") == 1


@local
def test_a_run_that_could_not_be_opened_is_tried_again(
    root: str, finished: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    opening = Run.open

    def fail(*_: object, **__: object) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(Run, "open", fail)
    for place in (root, finished.url):
        caplog.clear()
        watched = Watched([place])
        for _ in range(2):
            assert value(watched.scrape(deadline=LONG), "tba_run_up", root=finished.root, run=finished.name) == 0
        assert caplog.text.count("is left out") == 1
        monkeypatch.setattr(Run, "open", opening)
        assert value(watched.scrape(deadline=LONG), "tba_run_up", root=finished.root, run=finished.name) == 1
        monkeypatch.setattr(Run, "open", fail)


@local
def test_a_folder_becomes_a_run_once_it_has_its_record(root: str, finished: Run):
    record = path_of(finished, layout.RUN)
    data = record.read_bytes()
    record.unlink()
    watched = Watched([root])
    samples = watched.scrape(deadline=LONG)
    assert value(samples, "tba_run_up") is None
    assert value(samples, "tba_up") == 0  # a root without runs may have a wrong name
    record.write_bytes(data)
    assert value(watched.scrape(deadline=LONG), "tba_run_up", run=finished.name) == 1


@local
def test_old_runs_are_not_read_and_a_living_one_is_shown_at_once(root: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flows.metrics.watched.DORMANT_AT_ONCE", 0)
    with pytest.MonkeyPatch.context() as past:
        later(past, minutes=-3 * 24 * 60)
        runs = [SyntheticRun(root, f"run-{number}").begin().run for number in range(3)]
    for run in runs:
        assert run_reader.RunReader(run).is_old
    read: list[str] = []
    reading = run_reader.RunReader.read

    def noted(reader: run_reader.RunReader) -> object:
        read.append(reader.run.name)
        return reading(reader)

    monkeypatch.setattr(run_reader.RunReader, "read", noted)
    with HeldLease(runs[1], "trainer", every=3600.0):
        samples = Watched([root]).scrape(deadline=LONG)
    assert value(samples, "tba_run_state", run="run-1", state="running") == 1
    assert read == ["run-1"]


@local
def test_readings_that_hang_do_not_keep_a_root_from_being_listed(root: str, live: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flows.metrics.watched.READ_AT_ONCE", 1)
    may, looking, look = threading.Event(), threading.Event(), run_reader.RunReader.look

    def hang(reader: run_reader.RunReader) -> bool:
        looking.set()
        may.wait(300)
        return look(reader)

    monkeypatch.setattr(run_reader.RunReader, "look", hang)
    watched = Watched([root])
    try:
        watched.scrape(deadline=2.0)
        assert looking.is_set()
        listed: list[str] = []
        monkeypatch.setattr("flows.metrics.watched.run_urls", lambda url: (listed.append(url), run_urls(url))[1])
        watched.scrape(deadline=2.0)
        assert listed == [root]
    finally:
        may.set()


@local
def test_dormant_runs_are_looked_at_in_turn(root: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flows.metrics.watched.DORMANT_AT_ONCE", 1)
    runs = [SyntheticRun(root, f"run-{number}").begin().run for number in range(3)]
    watched = Watched([root])
    assert [value(watched.scrape(deadline=LONG), "tba_run_state", run=run.name, state="interrupted") for run in runs]
    looks: list[str] = []
    look = run_reader.RunReader.look

    def counted(reader: run_reader.RunReader) -> bool:
        looks.append(reader.run.name)
        return look(reader)

    monkeypatch.setattr(run_reader.RunReader, "look", counted)
    for _ in range(3):
        watched.scrape(deadline=LONG)
    assert sorted(looks) == [run.name for run in runs]


@local
def test_an_old_run_is_shown_only_if_it_is_named(root: str, monkeypatch: pytest.MonkeyPatch):
    class InTwoDays(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(UTC) + timedelta(days=2)

    run = make_run(root)
    monkeypatch.setattr(run_reader, "datetime", InTwoDays)
    assert value(Watched([root]).scrape(deadline=LONG), "tba_run_up") is None
    assert value(Watched([root]).scrape(deadline=LONG), "tba_root_runs") == 1
    assert value(Watched([run.url]).scrape(deadline=LONG), "tba_run_up") == 1


@local
def test_a_root_that_cannot_be_read_is_down_until_it_can(root: str, live: Run, monkeypatch: pytest.MonkeyPatch):
    watched = Watched([root, "s3://nobody-has-this/x"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    samples = watched.scrape(deadline=0.5)
    assert value(samples, "tba_up", root="s3://nobody-has-this/x") == 0
    until(lambda: value(watched.scrape(deadline=0.5), "tba_up", root=root) == 1)


@local
def test_a_store_that_fails_takes_the_metrics_of_a_run_away(live: Run, monkeypatch: pytest.MonkeyPatch):
    watched, listing = Watched([live.url]), LocalStore.list
    assert value(watched.scrape(deadline=LONG), "tba_run_step") == 5

    def fail(*_: object, **__: object) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(LocalStore, "list", fail)
    samples = watched.scrape(deadline=LONG)
    assert [metric.name for metric, _, _ in samples] == ["tba_run_up"]
    assert samples[0][2] == 0
    monkeypatch.setattr(LocalStore, "list", listing)
    assert value(watched.scrape(deadline=LONG), "tba_run_up") == 1


@local
def test_a_scrape_does_not_wait_for_a_store_that_hangs(live: Run, finished: Run, monkeypatch: pytest.MonkeyPatch):
    may, listing = threading.Event(), LocalStore.list

    def hang(store: LocalStore, *asked: object, **options: object) -> object:
        if store.url == live.url:
            may.wait(300)
        return listing(store, *asked, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(LocalStore, "list", hang)
    watched = Watched([live.url, finished.url])
    samples = watched.scrape(deadline=2.0)
    assert value(samples, "tba_run_up", run="live") == 0
    may.set()
    until(lambda: value(watched.scrape(deadline=1.0), "tba_run_up", run="live") == 1)
    assert value(watched.scrape(deadline=LONG), "tba_run_up", run="first") == 1
