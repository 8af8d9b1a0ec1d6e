from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import layout
from storage.log.compactions import PAYLOAD
from storage.log.schema import encode, to_table
from storage.log.shard_checks import check_compacted, read_shard
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from tba.errors import Damaged, DataError, Superseded
from tba.types import Asked
from tests.support.builders import from_table, make_shard, make_trajectory

KEY = layout.shard(0, 0)
SHARD = make_shard({"a": [0.0, 1.0], "b": [0.5]})
TABLE = to_table(SHARD, run="first", searcher=0, seq=0)


def with_column(name: str, values: list[object], kind: pa.DataType | None = None) -> bytes:
    array = pa.array(values, kind or TABLE.schema.field(name).type)
    return encode(TABLE.set_column(TABLE.column_names.index(name), name, array))


def renamed(**metadata: str) -> bytes:
    said = {key.decode(): value.decode() for key, value in (TABLE.schema.metadata or {}).items()}
    return encode(TABLE.replace_schema_metadata({**said, **metadata}))


def no_text(name: str) -> bytes:
    """Return a text column with bytes that are not UTF-8."""
    offsets = pa.array([0, 2, 4, 6], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"\xff\xfe" * 3)])
    return encode(TABLE.set_column(TABLE.column_names.index(name), name, column))


def with_steps(*ends: list[int], value: float = 0.5) -> bytes:
    """Return rows whose steps end at these places; the last row has no steps."""
    columns = {"step_ends": [*ends, None], "step_values": [*([value] * len(it) for it in ends), None]}
    table = TABLE
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.array(values, table.schema.field(name).type))
    return encode(table)


NAN, INF = float("nan"), float("inf")
LISTS = [[-0.5] * 4] * 3
FAULTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "not a readable"),
    "not Parquet": (lambda: b"PAR1 but not really PAR1", "not a readable"),
    "truncated": (lambda: encode(TABLE)[:-9], "not a readable"),
    "torn in the middle": (lambda: encode(TABLE)[:400] + bytes(60) + encode(TABLE)[460:], "not a readable"),
    "another run's": (lambda: renamed(run="second"), "'second' of 'run', not 'first'"),
    "another searcher's": (lambda: renamed(searcher="1"), "'1' of 'searcher', not '0'"),
    "another append's": (lambda: renamed(seq="4"), "'4' of 'seq', not '0'"),
    "another schema version": (lambda: renamed(schema_version="2"), "'2' of 'schema_version', not '1'"),
    "no metadata": (lambda: encode(TABLE.replace_schema_metadata(None)), "says nothing of 'run'"),
    "no rows": (lambda: encode(TABLE.slice(0, 0)), "no rows"),
    "a column less": (lambda: encode(TABLE.drop_columns(["ref_logps"])), "no column 'ref_logps'"),
    "another type": (lambda: with_column("reward", ["1"] * 3, pa.string()), "'reward' is string, not double"),
    "a missing value": (lambda: with_column("reward", [1.0, None, 0.0]), "'reward' has missing values"),
    "a missing token": (lambda: with_column("ref_logps", [[None] * 4] * 3), "'ref_logps' has missing values"),
    "logps of a reference for some rows": (
        lambda: with_column("ref_logps", [*LISTS[1:], None]), "'ref_logps' has missing values"
    ),
    "other row numbers": (lambda: with_column("trajectory_id", ["0/0/1", "0/0/0", "0/0/2"]), "not numbered from 0/0/0"),
    "another searcher in a row": (lambda: with_column("searcher", [0, 0, 1]), "'searcher' is not 0"),
    "rows of another schema": (lambda: with_column("schema_version", [1, 2, 1]), "'schema_version' is not 1"),
    "a reward that is no number": (lambda: with_column("reward", [NAN, 0.0, 0.0]), "'reward' has a number"),
    "an endless reward": (lambda: with_column("reward", [0.0, INF, 0.0]), "'reward' has a number"),
    "an absurd reward": (lambda: with_column("reward", [0.0, 0.0, -1e101]), "above 1e+100"),
    "an endless part": (lambda: with_column("reward_parts", [[("x", INF)], [], []]), "'reward_parts' has a number"),
    "an endless logp": (lambda: with_column("ref_logps", [*LISTS[1:], [0, 0, -INF, 0]]), "'ref_logps' has a number"),
    "a logp that is no number": (
        lambda: with_column("behaviour_logps", [*LISTS[1:], [0, NAN, 0, 0]]),
        "'behaviour_logps' has a number",
    ),
    "too few logps": (lambda: with_column("ref_logps", [*LISTS[1:], [0.0]]), "lengths of 'ref_logps'"),
    "a mask of another length": (
        lambda: with_column("loss_mask", [None, [True] * 4, [True] * 3]), "lengths of 'loss_mask'"
    ),
    "a mask for nothing": (lambda: with_column("loss_mask", [[], None, None]), "lengths of 'loss_mask'"),
    "a mask with a gap": (lambda: with_column("loss_mask", [[True, None] * 2, None, None]), "'loss_mask' has missing"),
    "another mask's type": (
        lambda: with_column("loss_mask", [[1] * 4] * 3, pa.list_(pa.int32())), "'loss_mask' is list<element: int32>"
    ),
    "steps without values": (lambda: with_column("step_ends", [[4], None, None]), "lengths of 'step_values'"),
    "steps beyond the end": (lambda: with_steps([2, 5], [4]), "'step_ends' do not end with the response"),
    "steps that stop short": (lambda: with_steps([4], [1, 3]), "'step_ends' do not end with the response"),
    "no steps": (lambda: with_steps([], [4]), "'step_ends' do not end with the response"),
    "a step without tokens": (lambda: with_steps([4], [2, 2, 4]), "'step_ends' has a step without tokens"),
    "steps that go back": (lambda: with_steps([3, 1, 4], [4]), "'step_ends' has a step without tokens"),
    "a first step of nothing": (lambda: with_steps([4], [0, 4]), "'step_ends' has a step without tokens"),
    "a value that is none": (lambda: with_steps([4], [1, 4], value=NAN), "'step_values' has a number"),
    "a wrong length": (lambda: with_column("length", [4, 4, 5]), "lengths of 'response_tokens'"),
    "a prompt without tokens": (lambda: with_column("prompt_tokens", [[1], [], [1]]), "a prompt has no tokens"),
    "a negative token": (lambda: with_column("prompt_tokens", [[1], [-1], [1]]), "'prompt_tokens' has a negative"),
    "a column twice": (
        lambda: encode(TABLE.append_column("reward", TABLE["reward"])), "'reward' more than once"
    ),
    "another column twice": (
        lambda: encode(TABLE.append_column("judge", TABLE["slot"]).append_column("judge", TABLE["slot"])),
        "'judge' more than once",
    ),
    "a prompt's name that is no text": (lambda: no_text("prompt_id"), "Invalid UTF8"),
    "a response that is no text": (lambda: no_text("response"), "Invalid UTF8"),
    "a time beyond all calendars": (lambda: with_column("created_at", [2**62] * 3), "beyond all calendars"),
    "a version below 0": (lambda: with_column("version_start", [0, -1, 0]), "'version_start' has a number below 0"),
    "other content than its hash": (
        lambda: with_column("content_hash", [""] * 3),
        "'content_hash' does not match",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_shard_that_cannot_be_trusted_is_refused_by_name_and_fault(fault: str):
    data, message = FAULTS[fault]
    with pytest.raises(Damaged) as refused:
        read_shard("first", KEY, data())
    assert KEY in str(refused.value)
    assert message in str(refused.value)


NOT_SHARDS = [
    *("trajectories/notes.txt", "trajectories/searcher=0/seq=00000000.parquet", "searcher=000/seq=00000000.parquet"),
    *("trajectories/searcher=0000/seq=00000000.parquet", "trajectories/searcher=000/seq=000000000.parquet"),
    *("trajectories/searcher=000/seq=00000000 (1).parquet", "trajectories/searcher=000/seq=3000000000.parquet"),
    *("trajectories/searcher=3000000000/seq=00000000.parquet", "trajectories/searcher=00٣/seq=00000000.parquet"),
]  # fmt: skip


@pytest.mark.parametrize("key", NOT_SHARDS)
def test_a_name_that_is_not_a_shards_is_refused(key: str):
    with pytest.raises(Damaged, match="not the name of a shard"):
        read_shard("first", key, encode(TABLE))


@given(searcher=st.integers(0, 2**31 - 1), seq=st.integers(0, 2**31 - 1))
def test_a_shards_name_says_whose_it_is(searcher: int, seq: int):
    key = layout.shard(searcher, seq)
    assert layout.parse_shard(key) == (searcher, seq)
    assert layout.parse_searcher(key.split("/")[1]) == searcher


@pytest.mark.parametrize("folder", ["searcher=0", "searcher=0000", "searcher=000 copy", "searcher=3000000000", ""])
def test_a_folder_of_another_name_is_no_searchers(folder: str):
    assert layout.parse_searcher(folder) is None


def test_a_name_that_no_column_holds_is_not_given():
    for name in ((0, 2**31), (2**31, 0), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="from 0 to 2147483647"):
            layout.shard(*name)


def test_a_flipped_bit_anywhere_is_refused_or_harmless():
    data = encode(TABLE)
    positions = [0, len(data) - 1, *np.random.default_rng(0).integers(0, len(data), 150).tolist()]
    refused = 0
    for position in positions:
        torn = bytearray(data)
        torn[position] ^= 1 << position % 8
        try:
            assert read_shard("first", KEY, bytes(torn)) == TABLE
        except Damaged:
            refused += 1
    assert refused > len(positions) / 2


def test_columns_that_a_task_adds_are_kept():
    more = TABLE.append_column("judge", pa.array(["x", "y", "z"]))
    assert read_shard("first", KEY, encode(more)) == more


def test_what_is_appended_is_a_shard_of_its_name(run: Run):
    log = Trajectories(run)
    key = log.append(2, 5, make_shard({"a": [1.0]}, searcher=2, round=5))
    assert key == "trajectories/searcher=002/seq=00000005.parquet"
    [found] = from_table(read_shard(run.name, key, run.store.read(key)))
    assert (found.trajectory_id, found.reward) == ("2/5/0", 1.0)


def test_the_same_append_again_adds_nothing(run: Run):
    log = Trajectories(run)
    key = log.append(0, 0, SHARD)
    stored = run.store.list(layout.TRAJECTORIES), run.store.read(key)
    assert log.append(0, 0, SHARD) == key
    assert (run.store.list(layout.TRAJECTORIES), run.store.read(key)) == stored


def test_other_content_under_the_name_means_another_incarnation(run: Run):
    log = Trajectories(run)
    key = log.append(0, 0, SHARD)
    stored = run.store.read(key)
    with pytest.raises(Superseded, match="searcher=000/seq=00000000"):
        log.append(0, 0, SHARD[:2])
    assert run.store.read(key) == stored


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_the_same_content_in_other_bytes_is_the_same_append(run: Run):
    table = TABLE.append_column("judge", pa.array(["x", "y", "z"])).drop_columns(["judge"])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none")
    run.store.create(KEY, sink.getvalue().to_pybytes())
    assert Trajectories(run).append(0, 0, SHARD) == KEY


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_of_racing_incarnations_one_is_stored_and_the_others_are_superseded(run: Run):
    def append(life: int) -> str:
        try:
            Trajectories(run).append(0, 0, [make_trajectory(reward=float(life))])
        except Superseded:
            return "superseded"
        return "stored"

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(append, range(8)))
    assert sorted(ends) == ["stored"] + ["superseded"] * 7
    [found] = from_table(read_shard(run.name, KEY, run.store.read(KEY)))
    assert found.reward == ends.index("stored")


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_a_restarted_searcher_goes_on_with_the_first_round_that_is_missing(run: Run):
    log = Trajectories(run)
    assert log.next_seq(1) == 0
    for round in (0, 1, 3):
        log.append(1, round, make_shard({"a": [1.0]}, searcher=1, round=round))
    assert log.next_seq(1) == 2
    assert log.next_seq(0) == 0
    log.append(1, 2, make_shard({"a": [1.0]}, searcher=1, round=2))
    assert log.next_seq(1) == 4


def test_the_places_of_stored_trajectories_are_told_shard_by_shard(run: Run):
    log = Trajectories(run)
    stored = [make_shard({"a": [1.0, 0.0], "b": [1.0]}, round=round) for round in (0, 2)]
    for seq, shard in enumerate(stored):
        log.append(0, seq, shard)
    run.store.create(layout.shard(0, 2), b"not a shard")
    assert log.asked(0, [1]) == [Asked(it.round, it.slot, it.prompt_id) for it in stored[1]]
    assert log.asked(0, range(9)) == log.asked(0, [0]) + log.asked(0, [1])
    assert log.asked(1, range(9)) == []


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_nothing_and_strangers_cannot_be_appended(run: Run):
    with pytest.raises(ValueError, match="at least 1 trajectory, got 0"):
        Trajectories(run).append(0, 0, [])
    with pytest.raises(ValueError, match="a trajectory of searcher 4"):
        Trajectories(run).append(0, 0, [make_trajectory(searcher=4)])


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_logps_of_a_reference_are_stored_for_all_rows_of_a_shard_or_for_none(run: Run):
    rows = [make_trajectory(slot=slot, ref_logps=None) for slot in range(2)]
    key = Trajectories(run).append(0, 0, rows)
    assert [it.ref_logps for it in from_table(read_shard(run.name, key, run.store.read(key)))] == [None, None]
    with pytest.raises(DataError, match=r"seq=00000001.*column 'ref_logps' has missing values"):
        Trajectories(run).append(0, 1, [rows[0], make_trajectory(slot=1)])


def test_logps_of_a_reference_lack_in_all_rows_of_a_compacted_shard_or_in_those_that_lost_their_payload():
    unknown = make_shard({"a": [0.0, 1.0], "b": [0.5]}, ref_logps=None)
    lost, kept = (given_up(to_table(it, run="first", searcher=0, seq=0)) for it in (unknown, SHARD))
    check_compacted(lost, KEY, given_up=1)
    check_compacted(kept, KEY, given_up=1)
    with pytest.raises(Damaged, match=rf"{KEY}: it has rows with only some of .*ref_logps"):
        check_compacted(with_values(kept, "ref_logps", [None, None, [0.0] * 4]), KEY, given_up=1)


def given_up(table: pa.Table) -> pa.Table:
    """Return the rows of a shard, the first without its payload."""
    for name in PAYLOAD:
        table = with_values(table, name, [None, *table[name].to_pylist()[1:]])
    return table


def with_values(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(table.column_names.index(name), field, pa.array(values, field.type))


@pytest.mark.parametrize("root", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": NAN}, "'reward' has a number that is not finite"),
        ({"prompt_tokens": ()}, "a prompt has no tokens"),
        ({"behaviour_logps": (-0.5,)}, "lengths of 'behaviour_logps'"),
        ({"loss_mask": (True, False)}, "lengths of 'loss_mask'"),
        ({"step_ends": (1, 2), "step_values": (0.5, 0.5)}, "'step_ends' do not end with the response"),
        ({"step_ends": (1, 3)}, "lengths of 'step_values'"),
        ({"loss_mask": (True, 2, False)}, "column 'loss_mask' cannot hold its values"),
    ],
)
def test_what_the_buffer_would_refuse_is_not_stored(run: Run, changes: dict[str, Any], reason: str):
    with pytest.raises(DataError, match=f"searcher=000/seq=00000000.*{reason}"):
        Trajectories(run).append(0, 0, [make_trajectory(**changes)])
    assert run.store.list(layout.TRAJECTORIES) == []
