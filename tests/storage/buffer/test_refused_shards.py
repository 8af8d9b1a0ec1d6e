"""Syncs that admit nothing, and shards that are refused, that cannot be read, or that have foreign names."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from storage import layout
from storage.log.schema import encode, to_table
from storage.log.sync_records import read_chain
from storage.objects.store import Store
from storage.runs.events import read_events
from storage.runs.run import Run
from tba.errors import Missing, RunFailed, StorageError
from tests.support.builders import make_shard
from tests.support.storage.small_buffers import append, kinds, make_buffer

on_disk = pytest.mark.parametrize("root", ["local"], indirect=True)


@on_disk
def test_an_empty_sync_keeps_the_recent_set_and_says_so(run: Run):
    buffer = make_buffer(run, recent_share=1.0)
    append(run, make_shard({"a": [0.0, 1.0], "b": [0.0, 1.0]}))
    buffer.sync(0, step=0)
    assert buffer.sync(1, step=2) == 0
    assert {draw.trajectory_id.split("/")[1] for draw in buffer.draw(3)} == {"0"}
    [event] = [event for event in read_events(run) if event["kind"] == "empty-sync"]
    assert (event["severity"], event["message"]) == ("warning", "sync 1 admits nothing; recent is still sync 0")


@on_disk
def test_a_branch_without_a_prompt_within_the_bounds_is_told_of_when_it_begins(run: Run):
    buffer = make_buffer(run, mean_reward_between=(0.0, 1.0))
    rounds = [
        {"a": [0.0, 0.0]},
        {"a": [0.0]},
        {"b": [0.0, 1.0]},
        {"c": [1.0]},
        {"c": [1.0]},
        {"b": [0.5]},
        {"c": [1.0]},
    ]
    for sync, shard in enumerate(rounds):
        append(run, make_shard(shard, round=sync))
        buffer.sync(sync, step=2 * sync)
        buffer.draw(2 * sync + 1)
    events = [event for event in read_events(run) if event["kind"] == "no-prompt-within-bounds"]
    assert [(event["data"]["sync"], event["data"]["branch"]) for event in events] == [
        (0, "prioritised"), (0, "recent"), (3, "recent"), (6, "recent"),
    ]  # fmt: skip
    assert events[2]["message"].startswith("sync 3: no recent prompt has a mean reward within sampling.mean_reward_")


@on_disk
def test_a_run_in_which_nothing_arrives_says_so_instead_of_hanging(run: Run):
    buffer = make_buffer(run)
    assert buffer.sync(0, step=0) == 0
    with pytest.raises(RunFailed, match="step 1: there is nothing to draw"):
        buffer.draw(1)
    append(run, make_shard({"a": [0.0, 1.0]}))
    buffer.sync(1, step=2)
    assert buffer.draw(3)


NAN = float("nan")
GOOD = to_table(make_shard({"a": [0.0, 1.0]}, searcher=1), run="first", searcher=1, seq=0)
INVALID = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.array([0, 2, 4], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe" * 2)]
)
FAR = pa.array([2**62] * 2, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def good_but(column: str, values: pa.Array) -> bytes:
    return encode(GOOD.set_column(GOOD.column_names.index(column), column, values))


BAD: dict[str, Callable[[], bytes]] = {
    "damaged": lambda: b"PAR1 torn PAR1",
    "truncated": lambda: encode(GOOD)[:-50],
    "foreign": lambda: encode(GOOD.replace_schema_metadata({"run": "elsewhere"})),
    "another searcher's": lambda: encode(to_table(make_shard({"a": [0.0]}), run="first", searcher=0, seq=0)),
    "of another schema": lambda: encode(GOOD.drop_columns(["seed"])),
    "not a number": lambda: good_but("reward", pa.array([NAN, 0.0])),
    "with a column twice": lambda: encode(GOOD.append_column("reward", GOOD["reward"])),
    "of a prompt that is no text": lambda: good_but("prompt_id", INVALID),
    "with a response that is no text": lambda: good_but("response", INVALID),
    "beyond all calendars": lambda: good_but("created_at", FAR),
    "of a version that no index holds": lambda: good_but("version_start", pa.array([2**31 - 1] * 2, pa.int32())),
}


@on_disk
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_shard_is_refused_with_an_event_and_training_goes_on(run: Run, fault: str):
    buffer, key = make_buffer(run), layout.shard(1, 0)
    append(run, make_shard({"a": [0.0, 1.0]}))
    run.store.create(key, BAD[fault]())
    assert buffer.waiting() == 2
    assert buffer.sync(0, step=0) == 2
    assert len(buffer.draw(1)) == 6

    [event] = [event for event in read_events(run) if event["kind"] == "shard-refused"]
    [refused] = read_chain(run)[0].refused
    assert refused.key == key and refused.reason
    assert event["severity"] == "error"
    assert event["message"] == f"{key}: {refused.reason}"

    resumed = make_buffer(run, attempt=2)
    assert resumed.sync(0, step=0) == 2
    assert resumed.draw(1) == buffer.draw(1)
    assert resumed.sync(1, step=2) == 0
    assert kinds(run).count("shard-refused") == 1


@on_disk
@pytest.mark.parametrize("needed", [True, False])
def test_rows_without_the_reference_are_refused_where_the_objective_needs_it(run: Run, needed: bool):
    append(run, make_shard({"a": [0.0, 1.0]}))
    append(run, make_shard({"a": [0.0, 1.0]}, searcher=1, ref_logps=None))
    buffer = make_buffer(run, needs_reference=needed)
    assert buffer.sync(0, step=0) == (2 if needed else 4)
    refused = {it.key: it.reason for it in read_chain(run)[0].refused}
    reason = "column 'ref_logps' has missing values, and the objective needs them"
    assert refused == ({layout.shard(1, 0): reason} if needed else {})


STRAY = {
    "a file manager's copy": "trajectories/searcher=000/seq=00000000 (1).parquet",
    "a copied folder": "trajectories/searcher=000 copy/seq=00000000.parquet",
    "no number": "trajectories/searcher=000/seq=first.parquet",
    "more than a column holds": "trajectories/searcher=000/seq=3000000000.parquet",
    "deeper": "trajectories/searcher=000/old/seq=00000000.parquet",
    "no text": "trajectories/searcher=000/\udcff.parquet",
}


@on_disk
@pytest.mark.parametrize("stray", STRAY)
def test_a_stray_name_is_refused_unread_and_training_goes_on(run: Run, stray: str):
    append(run, make_shard({"a": [0.0, 1.0]}))
    path = Path(run.url) / STRAY[stray]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(GOOD))
    for attempt in (1, 2):
        buffer = make_buffer(run, attempt=attempt)
        assert buffer.sync(0, step=0) == 2
        assert buffer.sync(1, step=2) == 0
        assert len(buffer.draw(3)) == 6
    first, second = read_chain(run)
    [refused] = first.refused
    assert second.refused == []
    assert refused.key.isprintable() and refused.key[:24] == STRAY[stray][:24]
    assert refused.reason.startswith("not the ")
    assert kinds(run).count("shard-refused") == 1


class Unreadable:
    """A store in which some objects cannot be read for a while."""

    def __init__(self, store: Store, *keys: str, error: type[StorageError] = StorageError):
        self.store, self.keys, self.error = store, keys, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read(self, key: str) -> bytes:
        if any(key.startswith(start) for start in self.keys):
            raise self.error(f"{key}: AccessDenied")
        return self.store.read(key)

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes]:
        return [self.read(key) for key in keys]


@on_disk
@pytest.mark.parametrize("error", [StorageError, Missing])
def test_a_shard_that_cannot_be_read_is_passed_over_and_admitted_when_it_can(run: Run, error: type[StorageError]):
    for searcher in range(3):
        append(run, make_shard({"a": [0.0, 1.0]}, searcher=searcher))
    key = layout.shard(1, 0)
    blind = replace(run, store=cast(Store, Unreadable(run.store, key, error=error)))
    buffer = make_buffer(blind)
    assert buffer.waiting() == 4
    assert [buffer.sync(0, step=0), buffer.sync(1, step=2)] == [4, 0]
    [event] = [event for event in read_events(run) if event["kind"] == "shard-unread"]
    assert (event["data"]["key"], event["severity"]) == (key, "warning")
    buffer.run.store.keys = ()  # pyright: ignore[reportAttributeAccessIssue]
    assert buffer.sync(2, step=4) == 2
    assert [record.refused for record in read_chain(run)] == [[], [], []]


@on_disk
def test_a_store_that_is_away_ends_the_look_not_the_shards(run: Run):
    for round in range(70):
        append(run, make_shard({"a": [0.0]}, round=round))
    store = Unreadable(run.store, "trajectories/")
    buffer = make_buffer(replace(run, store=cast(Store, store)))
    assert buffer.waiting() == 0
    assert len(buffer.arrivals.unread) == 32  # the buffer did not try to read the others
    store.keys = ()
    assert buffer.waiting() == 70


@on_disk
def test_a_refusal_is_told_however_soon_after_the_trainer_dies(run: Run, monkeypatch: pytest.MonkeyPatch):
    append(run, make_shard({"a": [0.0, 1.0]}))
    run.store.create(layout.shard(1, 0), BAD["damaged"]())
    create = run.store.create

    def die_after_the_record(key: str, data: bytes) -> None:
        create(key, data)
        if key == layout.sync(0):
            raise KeyboardInterrupt

    monkeypatch.setattr(run.store, "create", die_after_the_record)
    with pytest.raises(KeyboardInterrupt):
        make_buffer(run).sync(0, step=0)
    monkeypatch.undo()
    make_buffer(run, attempt=2).sync(0, step=0)
    assert kinds(run).count("shard-refused") == 1


@on_disk
def test_a_shard_that_was_refused_once_is_never_looked_at_again(run: Run):
    buffer, key = make_buffer(run), layout.shard(1, 0)
    append(run, make_shard({"a": [0.0, 1.0]}))
    run.store.create(key, BAD["damaged"]())
    buffer.sync(0, step=0)
    run.store.delete(key)
    run.store.create(key, encode(GOOD))  # the repaired object breaks the rules and stays refused
    resumed = make_buffer(run, attempt=2)
    resumed.sync(0, step=0)
    assert (buffer.waiting(), resumed.waiting()) == (0, 0)
    assert resumed.sync(1, step=2) == 0
    assert [len(record.refused) for record in read_chain(run)] == [1, 0]
    assert kinds(run).count("shard-refused") == 1


@on_disk
def test_an_object_with_another_name_is_refused_by_name(run: Run):
    append(run, make_shard({"a": [0.0, 1.0]}))
    run.store.create("trajectories/searcher=000/notes.txt", b"hello")
    buffer = make_buffer(run)
    assert buffer.sync(0, step=0) == 2
    assert buffer.sync(1, step=2) == 0
    assert [[refused.key for refused in record.refused] for record in read_chain(run)] == [
        ["trajectories/searcher=000/notes.txt"], []
    ]  # fmt: skip
