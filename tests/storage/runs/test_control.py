"""The desired state of a run."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage import layout
from storage.maintenance.check import check
from storage.objects import records
from storage.runs.control import State, change_state, read_state, restore_state
from storage.runs.run import Run
from tba.errors import ConfigError, Damaged

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def test_a_run_goes_on_until_someone_says_otherwise(run: Run):
    assert read_state(run) == State(desired="run", searchers=1)
    change_state(run, searchers=3)
    change_state(run, desired="stop", why="asked by a test")
    state = read_state(run)
    assert (state.desired, state.searchers, state.why) == ("stop", 3, "asked by a test")
    assert state.changed_at


def test_changes_made_at_once_all_count(run: Run):
    def change(number: int) -> None:
        change_state(run, **({"searchers": 5} if number % 2 else {"desired": "stop"}))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(change, range(6)))
    state = read_state(run)
    assert (state.desired, state.searchers) == ("stop", 5)


@local
@pytest.mark.parametrize("change", [{"desired": "pause"}, {"searchers": -1}, {"searchers": "2"}, {"epoch": 3}])
def test_a_change_that_means_nothing_is_refused(run: Run, change: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(change))):
        change_state(run, **change)
    assert not run.store.exists(layout.STATE)


@local
def test_a_change_keeps_what_a_later_version_has_added(run: Run):
    change_state(run, searchers=2)
    record = records.read(run.store, layout.STATE)
    (Path(run.url) / layout.STATE).write_bytes(records.encode({**record, "added_later": [1]}))
    assert read_state(run).searchers == 2
    change_state(run, desired="stop")
    assert records.read(run.store, layout.STATE)["added_later"] == [1]
    assert read_state(run).desired == "stop"


WHOLE = {"desired": "stop", "searchers": 3, "why": "enough", "changed_at": records.now()}
DAMAGES = {
    "empty": b"",
    "not JSON": b"\x00\xff state",
    "a list": b"[]",
    "truncated": records.encode(WHOLE)[:-20],
    "fields are missing": b'{"desired": "run"}',
    **{
        f"{name}={value!r}": json.dumps({**WHOLE, name: value}).encode()
        for name, value in [
            ("desired", "pause"),
            ("desired", ["run"]),
            ("searchers", "3"),
            ("searchers", True),
            ("searchers", -1),
            ("searchers", float("nan")),
            ("searchers", float("inf")),
            ("why", 4),
            ("changed_at", None),
        ]
    },
}
damaged = pytest.mark.parametrize("data", DAMAGES.values(), ids=DAMAGES)


@local
@damaged
def test_a_state_that_cannot_be_read_is_named_and_never_guessed(run: Run, data: bytes):
    change_state(run, desired="stop", searchers=3)
    (Path(run.url) / layout.STATE).write_bytes(data)
    with pytest.raises(Damaged, match=r"control/state\.json"):
        read_state(run)
    with pytest.raises(Damaged, match=r"control/state\.json.*remove this object"):
        change_state(run, desired="run")
    assert (Path(run.url) / layout.STATE).read_bytes() == data
    assert [problem.key for problem in check(run).problems] == [layout.STATE]


@local
@damaged
def test_a_damaged_state_is_restored_as_it_was_read_last_and_a_whole_one_kept(run: Run, data: bytes):
    last = change_state(run, desired="stop", searchers=3, why="enough")
    (Path(run.url) / layout.STATE).write_bytes(data)
    assert restore_state(run, last) == last == read_state(run)
    changed = change_state(run, searchers=4)
    assert restore_state(run, last) == changed == read_state(run)
