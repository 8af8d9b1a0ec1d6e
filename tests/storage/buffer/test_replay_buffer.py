import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.fetched import fetched_of
from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.log.schema import encode, to_table
from storage.log.sync_records import read_chain
from storage.log.trajectories import Trajectories
from storage.objects.store import Store
from storage.runs.events import read_events
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.errors import ConfigError, Damaged, Missing, RunFailed, StorageError, Superseded
from tba.types import Draw, Trajectory, Version
from tests.support.builders import as_stored, make_shard, make_trajectory, rows_of
from tests.support.faults.rewriting import with_digest
from tests.support.storage import indexes
from tests.support.storage.indexes import Sections, make_eligibility, oracle_rows
from tests.support.storage.oracle import Oracle
from tests.support.storage.stored_objects import overwrite

on_disk = pytest.mark.parametrize("root", ["local"], indirect=True)

SLOTS, RESPONSES, CAPACITY = 3, 2, 8
SECTIONS = Sections(
    prompts_per_step=SLOTS, responses_per_prompt=RESPONSES, inv_temp=1.0, eligibility=make_eligibility(CAPACITY)
)


def make_buffer(run: Run, *, attempt: int = 1, **changes: Any) -> DuckReplayBuffer:
    """Make a buffer with SECTIONS, except the fields in `changes`, and with the options of `indexes.make_buffer`."""
    fields = {name: changes.pop(name) for name in [*changes] if hasattr(SECTIONS, name)}
    return indexes.make_buffer(run, replace(SECTIONS, **fields), attempt=attempt, **changes)


def append(run: Run, shard: Sequence[Trajectory]) -> str:
    return Trajectories(run).append(shard[0].searcher, shard[0].round, shard)


def arrivals(round: int) -> list[list[Trajectory]]:
    """Return the shards of two searchers in a round."""
    return [
        make_shard({f"p{(3 * round + n) % 5}": [round + s / 2, -1.0, 0.5] for n in range(3)}, searcher=s, round=round)
        for s in range(2)
    ]


def train(run: Run, buffer: DuckReplayBuffer, syncs: Sequence[int]) -> list[list[Draw]]:
    """Draw two steps before each sync except sync 0. Two searchers append a round before each sync."""
    draws = []
    for sync in syncs:
        if sync:
            draws += [buffer.draw(2 * sync - 1), buffer.draw(2 * sync)]
        if not buffer.recorded(sync):
            for shard in arrivals(sync):
                append(run, shard)
        buffer.sync(sync, step=2 * sync)
    return draws


def kinds(run: Run) -> list[str]:
    return [event["kind"] for event in read_events(run)]


# --- what is stored is what is learned from ---------------------------------------------------------------------------


def test_what_searchers_appended_is_what_is_drawn_and_fetched(run: Run):
    buffer = make_buffer(run)
    assert (buffer.recorded(0), buffer.waiting()) == (False, 0)
    shards = [*arrivals(0), *arrivals(1)]
    for shard in shards:
        append(run, shard)
    assert buffer.waiting() == 36
    assert buffer.sync(0, step=0) == 36
    assert (buffer.recorded(0), buffer.waiting()) == (True, 0)

    stored = {name: trajectory for shard in shards for name, trajectory in as_stored(shard).items()}
    draws = buffer.draw(1)
    drawn = [stored[draw.trajectory_id] for draw in draws]
    assert [draw.prompt_id for draw in draws] == [trajectory.prompt_id for trajectory in drawn]
    assert rows_of(buffer.fetch(draws)) == rows_of(fetched_of(drawn))


@on_disk
def test_a_record_says_what_it_admitted_and_continues_the_chain(run: Run):
    train(run, make_buffer(run), range(2))
    first, second = read_chain(run)
    assert [(shard.key, shard.rows) for shard in second.shards] == [(layout.shard(0, 1), 9), (layout.shard(1, 1), 9)]
    assert (first.sync, first.step, first.attempt, first.rows, first.refused) == (0, 0, 1, 18, [])
    assert (second.sync, second.step, second.previous_sha256) == (
        1,
        2,
        sha256(run.store.read(layout.sync(0))).hexdigest(),
    )
    for shard in first.shards:
        data = run.store.read(shard.key)
        assert (shard.bytes, shard.sha256) == (len(data), sha256(data).hexdigest())


@on_disk
def test_drawn_duplicates_are_the_same_trajectory(run: Run):
    append(run, make_shard({"a": [1.0]}))
    buffer = make_buffer(run)
    buffer.sync(0, step=0)
    first, second, *_ = rows_of(buffer.fetch(buffer.draw(1)))
    assert first == second


@on_disk
def test_a_shard_that_arrives_before_an_earlier_one_is_admitted_and_so_is_the_earlier_one(run: Run):
    buffer = make_buffer(run)
    for sync, round in enumerate((0, 2, 1, 3)):
        append(run, make_shard({"a": [0.0]}, round=round))
        assert buffer.sync(sync, step=2 * sync) == 1
    assert [[shard.seq for shard in record.shards] for record in read_chain(run)] == [[0], [2], [1], [3]]


@on_disk
def test_searchers_may_join_and_leave(run: Run):
    buffer = make_buffer(run)
    for sync, searcher in enumerate((4, 0, 1234)):
        append(run, make_shard({"a": [0.0]}, searcher=searcher))
        assert buffer.sync(sync, step=2 * sync) == 1
    assert buffer.sync(3, step=6) == 0


@on_disk
def test_shards_that_do_not_fit_in_memory_are_read_again(run: Run):
    ample, tight = make_buffer(run), make_buffer(run, memory_gb=1e-9)
    draws = train(run, ample, range(4))
    assert train(run, tight, range(4)) == draws
    assert [rows_of(tight.fetch(it)) for it in draws] == [rows_of(ample.fetch(it)) for it in draws]


@on_disk
def test_a_trajectory_that_no_record_admits_cannot_be_fetched(run: Run):
    append(run, make_shard({"a": [1.0, 2.0]}))
    buffer = make_buffer(run)
    buffer.sync(0, step=0)
    with pytest.raises(Missing, match="'0/7'"):
        buffer.fetch([replace(buffer.draw(1)[0], trajectory_id="0/7/0")])


# --- draws follow from seed, sampler and records ----------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    rounds=st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    impatient=st.booleans(),
)
def test_draws_are_those_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[int]], seed: int, impatient: bool
):
    root = str(tmp_path_factory.mktemp("root"))
    run = Run.create(root, "any", config={}, sampler_sql="", code_version="test")
    buffer, oracle = (
        make_buffer(run, seed=seed),
        Oracle(seed=seed, slots=SLOTS, responses=RESPONSES, recent_share=0.5, inv_temp=1.0, capacity=CAPACITY),
    )
    for sync, searchers in enumerate(rounds):
        shards = [
            make_shard({f"p{(searcher + n) % 4}": [0.1 * n, float(sync)] for n in range(2)}, searcher=searcher,
                       round=10 * sync + place)
            for place, searcher in enumerate(searchers)
        ]  # fmt: skip
        for shard in shards:
            append(run, shard)
            if impatient:
                buffer.waiting()
        buffer.sync(sync, step=sync)
        in_order = sorted(shards, key=lambda shard: (shard[0].searcher, shard[0].round))
        oracle.admit(sync, [row for shard in in_order for row in oracle_rows(shard)])
        if oracle.entered:
            expected = [drawn[:5] for drawn in oracle.draw(sync + 1)]
            draws = buffer.draw(sync + 1)
            assert [(d.slot, d.position, d.trajectory_id, d.prompt_id, d.branch) for d in draws] == expected


@on_disk
def test_draws_do_not_depend_on_the_runs_name(root: str):
    runs = [Run.create(root, name, config={}, sampler_sql="", code_version="test") for name in ("one", "two")]
    one, two = [train(run, make_buffer(run), range(4)) for run in runs]
    assert one == two


@on_disk
def test_draws_do_not_depend_on_when_arrivals_were_looked_for(root: str):
    draws = []
    for often in (False, True):
        run = Run.create(root, f"looked-{often}", config={}, sampler_sql="", code_version="test")
        buffer = make_buffer(run)
        for shard in reversed(arrivals(0)):
            append(run, shard)
            if often:
                buffer.waiting()
        draws.append(train(run, buffer, range(1)) + [buffer.draw(step) for step in range(1, 4)])
    assert draws[0] == draws[1]


@on_disk
def test_a_buffer_rebuilt_from_the_records_draws_what_an_unbroken_one_would_have(run: Run):
    unbroken = make_buffer(run)
    draws = train(run, unbroken, range(2))
    queues = json.loads(json.dumps(unbroken.queues()))  # in the form that a checkpoint stores
    draws += train(run, unbroken, range(2, 6))

    resumed = make_buffer(run, attempt=2)
    for sync in range(2):
        resumed.sync(sync, step=2 * sync)
    resumed.restore(queues)
    assert resumed.queues() == queues
    assert train(run, resumed, range(2, 6)) == draws[2:]
    assert resumed.queues() == unbroken.queues()
    assert resumed.draw(11) == unbroken.draw(11)


@on_disk
def test_queues_can_be_recomputed_by_drawing_again(run: Run):
    first, again = make_buffer(run), make_buffer(run)
    assert train(run, first, range(5)) == train(run, again, range(5))
    assert first.queues() == again.queues()


@on_disk
def test_queues_are_as_of_the_newest_record_whatever_was_drawn_since(run: Run):
    buffer = make_buffer(run)
    train(run, buffer, range(2))
    queues = buffer.queues()
    buffer.draw(3)
    assert buffer.queues() == queues


@on_disk
def test_a_users_sampler_is_checked_before_anything_starts(run: Run):
    with pytest.raises(ConfigError, match=r"^sampler SQL: .*slot"):
        make_buffer(run, sampler_sql="select 1")


# --- syncs that bring nothing, or nothing good ------------------------------------------------------------------------


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


# --- records are facts ------------------------------------------------------------------------------------------------


@on_disk
def test_a_stored_record_is_adopted_even_if_more_has_arrived_since(run: Run):
    append(run, make_shard({"a": [0.0, 1.0]}))
    make_buffer(run).sync(0, step=0)
    append(run, make_shard({"a": [2.0]}, round=1))
    late = make_buffer(run, attempt=2)
    assert late.waiting() == 3
    assert late.sync(0, step=0) == 2
    assert late.waiting() == 1
    assert late.sync(1, step=2) == 1
    assert [record.attempt for record in read_chain(run)] == [1, 2]


@on_disk
def test_an_attempt_that_was_superseded_writes_no_record(run: Run):
    claim_attempt(run)
    buffer = make_buffer(run, attempt=1)
    buffer.sync(0, step=0)
    claim_attempt(run)
    with pytest.raises(Superseded, match="attempt 2 of the trainer has taken over from attempt 1"):
        buffer.sync(1, step=2)
    assert len(read_chain(run)) == 1


@on_disk
def test_losing_the_race_for_a_record_is_adoption_for_the_newest_attempt(run: Run, monkeypatch: pytest.MonkeyPatch):
    claim_attempt(run)
    claim_attempt(run)
    append(run, make_shard({"a": [0.0, 1.0]}))
    old, new = make_buffer(run, attempt=1), make_buffer(run, attempt=2)
    monkeypatch.setattr(old.records, "check_attempt", lambda: None)  # its check came just before attempt 2 was claimed
    look = new.arrivals.look

    def look_too_long() -> None:
        look()
        old.sync(0, step=0)
        append(run, make_shard({"a": [2.0]}, round=1))

    monkeypatch.setattr(new.arrivals, "look", look_too_long)
    assert new.sync(0, step=0) == 2
    monkeypatch.undo()
    assert [record.attempt for record in read_chain(run)] == [1]
    assert new.sync(1, step=2) == 1


@on_disk
def test_losing_the_race_for_a_record_is_the_end_for_a_superseded_attempt(run: Run, monkeypatch: pytest.MonkeyPatch):
    claim_attempt(run)
    append(run, make_shard({"a": [0.0, 1.0]}))
    old, create = make_buffer(run, attempt=1), run.store.create

    def create_too_late(key: str, data: bytes) -> None:
        monkeypatch.undo()
        claim_attempt(run)
        make_buffer(run, attempt=2).sync(0, step=0)
        create(key, data)

    monkeypatch.setattr(run.store, "create", create_too_late)
    with pytest.raises(Superseded):
        old.sync(0, step=0)
    assert [record.attempt for record in read_chain(run)] == [2]


def test_buffers_racing_for_a_record_hold_the_same_one(run: Run):
    for shard in arrivals(0):
        append(run, shard)
    buffers, barrier = [make_buffer(run) for _ in range(4)], Barrier(4)

    def race(place: int) -> list[list[Draw]]:
        draws, buffer = [], buffers[place]
        for sync in range(3):
            barrier.wait(60)
            if place == sync:  # the round of a searcher arrives while all buffers list
                append(run, arrivals(sync + 1)[0])
            buffer.sync(sync, step=2 * sync)
            draws.append(buffer.draw(2 * sync + 1))
        return draws

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(race, range(4))
    assert others == [first] * 3
    assert len(read_chain(run)) == 3


@on_disk
def test_a_shard_that_changed_since_it_was_admitted_is_damage(run: Run):
    key = append(run, make_shard({"a": [0.0, 1.0]}))
    buffer = make_buffer(run, memory_gb=1e-9)
    buffer.sync(0, step=0)
    append(run, make_shard({"b": [0.0]}, round=1))
    buffer.sync(1, step=2)
    other = make_shard({"a": [5.0, 6.0]})
    overwrite(run, key, encode(to_table(other, run=run.name, searcher=0, seq=0)))
    with pytest.raises(Damaged, match=r"searcher=000/seq=00000000\.parquet"):
        make_buffer(run).sync(0, step=0)
    with pytest.raises(Damaged, match=r"searcher=000/seq=00000000\.parquet"):
        [buffer.fetch(buffer.draw(step)) for step in (3, 4)]
    run.store.delete(key)
    with pytest.raises(Missing, match=r"searcher=000/seq=00000000\.parquet"):
        make_buffer(run).sync(0, step=0)


@on_disk
def test_a_record_that_breaks_the_chain_is_damage(run: Run):
    train(run, make_buffer(run), range(3))
    record = json.loads(run.store.read(layout.sync(1)))
    overwrite(run, layout.sync(1), with_digest({**record, "created_at": "2030-01-01"}))
    buffer = make_buffer(run)
    for sync in range(2):
        buffer.sync(sync, step=2 * sync)
    with pytest.raises(Damaged, match=r"syncs/000002\.json does not continue record 1"):
        buffer.sync(2, step=4)


@on_disk
def test_a_record_of_another_arithmetic_is_named(run: Run):
    train(run, make_buffer(run), range(2))
    buffer = make_buffer(run)
    buffer.sync(0, step=0)
    with pytest.raises(Damaged, match=r"syncs/000001\.json says that it follows step 2, .* follows step 4"):
        buffer.sync(1, step=4)


@on_disk
def test_records_are_applied_one_after_the_other(run: Run):
    buffer = make_buffer(run)
    with pytest.raises(ValueError, match="expected record 0, got 1"):
        buffer.sync(1, step=2)
    buffer.sync(0, step=0)
    with pytest.raises(ValueError, match="expected record 1, got 0"):
        buffer.sync(0, step=0)


@on_disk
def test_no_draw_sees_what_no_record_admits(run: Run):
    buffer = make_buffer(run, prompts_per_step=20)
    append(run, [make_trajectory("a", tokens=(n,), slot=n) for n in range(3)])
    buffer.sync(0, step=0)
    append(run, [make_trajectory("b", tokens=(n,), slot=n, round=1) for n in range(3)])
    buffer.waiting()
    assert {draw.prompt_id for draw in buffer.draw(1)} == {"a"}
    buffer.sync(1, step=2)
    assert {draw.prompt_id for draw in buffer.draw(3)} == {"a", "b"}


# --- searchers in step ---


@on_disk
def test_in_step_a_record_admits_its_round_of_every_searcher_and_no_later_one(run: Run):
    """One round arrives early, and one was generated by the version of the same sync that admits it."""
    claim_attempt(run)
    buffer = make_buffer(run, searchers_in_step=2)

    def arrive(searcher: int, round: int, *, version: int = 0) -> None:
        versions = {"version_start": Version(version, 1), "version_end": Version(version, 1)}
        append(run, make_shard({"p": [0.0, 1.0]}, searcher=searcher, round=round, **versions))

    assert not buffer.ready(0, step=0, until=2)
    arrive(0, 0)
    assert not buffer.ready(0, step=0, until=2)
    arrive(1, 0)
    arrive(0, 1)
    assert buffer.ready(0, step=0, until=2)
    assert buffer.sync(0, step=0) == 4
    assert not buffer.ready(1, step=2, until=4)
    arrive(1, 1, version=1)
    assert buffer.ready(1, step=2, until=4)
    assert buffer.sync(1, step=2) == 4
    chain = [[(shard.searcher, shard.seq) for shard in record.shards] for record in read_chain(run)]
    assert chain == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert {draw.age for draw in buffer.draw(3)} <= {0, 2}
    later = make_buffer(run, searchers_in_step=2)
    assert later.ready(1, step=2, until=4)  # its record exists
    later.replay(1)
    assert later.draw(3) == buffer.draw(3)


@on_disk
def test_in_step_a_shard_that_was_refused_before_its_turn_is_not_waited_for(run: Run):
    claim_attempt(run)
    buffer = make_buffer(run, searchers_in_step=1)
    append(run, make_shard({"p": [0.0, 1.0]}))
    run.store.create(layout.shard(0, 1), b"half of it")
    assert buffer.ready(0, step=0, until=2)
    buffer.sync(0, step=0)
    assert buffer.ready(1, step=2, until=4)
    assert buffer.sync(1, step=2) == 0
    assert not buffer.ready(2, step=4, until=6)


@on_disk
def test_where_ages_are_bounded_a_record_waits_for_a_batch_that_is_young_until_the_next(run: Run):
    buffer = make_buffer(run, eligibility=make_eligibility(max_age=3))
    batch = SLOTS * RESPONSES
    append(run, make_shard({"p0": [0.0] * batch}))
    assert not buffer.ready(0, step=0, until=5), "they would be 4 steps old"
    assert buffer.ready(0, step=0, until=2)
    buffer.sync(0, step=0)
    buffer.draw(2)
    assert buffer.ready(1, step=2, until=4), "what was admitted counts"
    buffer.sync(1, step=2)
    assert not buffer.ready(2, step=4, until=6)
    append(run, make_shard({"p1": [0.0] * (batch - 1)}, round=1, version_start=Version(1, 1)))
    append(run, make_shard({"p2": [0.0] * batch}, round=2))
    assert not buffer.ready(2, step=4, until=6), "one lacks, others are too old"
    append(run, make_shard({"p3": [0.0]}, round=3, version_start=Version(1, 1)))
    assert buffer.ready(2, step=4, until=6)
    buffer.sync(2, step=4)
    assert make_buffer(run, eligibility=make_eligibility(max_age=3)).ready(2, step=4, until=999)  # its record exists
    assert {draw.prompt_id for step in (5, 6) for draw in buffer.draw(step)} <= {"p1", "p3"}


def test_where_nobody_waits_every_record_is_ready(run: Run):
    assert make_buffer(run).ready(0, step=0, until=2)
