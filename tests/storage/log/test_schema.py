from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from hashlib import md5
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.log.schema import TRAJECTORY_SCHEMA, content_hash, decode, encode, to_table
from tba.errors import DataError
from tba.types import Trajectory, Version
from tests.support.builders import from_table, make_shard, make_trajectory
from tests.support.storage.step_values import LOGPS, steps

INT32 = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
VERSION = st.builds(Version, INT32, INT32)
TIMES = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 5))
    return make_trajectory(
        draw(TEXT),
        tokens=draw(st.lists(INT32, min_size=length, max_size=length)),
        reward=draw(NUMBER),
        searcher=3,
        round=draw(INT32),
        slot=draw(INT32),
        version_start=draw(VERSION),
        version_end=draw(VERSION),
        group_id=draw(TEXT),
        prompt=draw(TEXT),
        response=draw(TEXT),
        prompt_tokens=tuple(draw(st.lists(INT32, max_size=5))),
        behaviour_logps=tuple(draw(st.lists(LOGPS, min_size=length, max_size=length))),
        ref_logps=tuple(draw(st.lists(LOGPS, min_size=length, max_size=length))),
        loss_mask=draw(st.none() | st.tuples(*[st.booleans()] * length)),
        **draw(steps(length)),
        reference_version=draw(VERSION),
        reward_parts=draw(st.dictionaries(TEXT, NUMBER, max_size=2)),
        finished=draw(st.booleans()),
        temperature=draw(NUMBER),
        top_p=draw(NUMBER),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        created_at=draw(TIMES),
        generate_seconds=draw(NUMBER),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=5))
def test_a_shard_gives_back_exactly_what_was_stored(stored: list[Trajectory]):
    table = to_table(stored, run="first", searcher=3, seq=7)
    found = from_table(decode(encode(table)))
    expected = sorted(stored, key=lambda t: (t.prompt_id, t.round, t.slot))
    assert [replace(t, trajectory_id="") for t in found] == expected
    assert [t.trajectory_id for t in found] == [f"3/7/{row}" for row in range(len(stored))]


def test_the_same_trajectories_give_the_same_bytes():
    shard = make_shard({"a": [0.0, 1.0], "b": [2.0]})
    first = encode(to_table(shard, run="first", searcher=0, seq=0))
    assert encode(to_table(list(reversed(shard)), run="first", searcher=0, seq=0)) == first
    assert encode(to_table(shard, run="second", searcher=0, seq=0)) != first


def test_a_table_has_the_documented_columns_and_says_whose_it_is():
    table = to_table(make_shard({"b": [1.0], "a": [0.0]}), run="first", searcher=0, seq=2)
    assert table.schema.equals(TRAJECTORY_SCHEMA)
    assert table["prompt_id"].to_pylist() == ["a", "b"]
    assert table["length"].to_pylist() == [4, 4]
    assert decode(encode(table)).schema.metadata == {
        b"run": b"first", b"searcher": b"0", b"seq": b"2", b"schema_version": b"1"
    }  # fmt: skip


def test_times_of_other_zones_are_the_same_instants():
    tokyo = datetime(2026, 1, 1, 9, tzinfo=timezone(timedelta(hours=9)))
    table = to_table([make_trajectory(created_at=tokyo)], run="first", searcher=0, seq=0)
    assert from_table(decode(encode(table)))[0].created_at == datetime(2026, 1, 1, tzinfo=UTC)


def test_content_is_prompt_and_response_tokens_and_nothing_else():
    assert content_hash("p", (1, 258)) == md5(b"p\n\x01\0\0\0\x02\x01\0\0").hexdigest()
    same = to_table([make_trajectory(reward=r, seed=int(r)) for r in (0.0, 1.0)], run="r", searcher=0, seq=0)
    assert len(set(same["content_hash"].to_pylist())) == 1
    other = to_table([make_trajectory("p"), make_trajectory("q"), make_trajectory("p", tokens=(7,))],
                     run="r", searcher=0, seq=0)  # fmt: skip
    assert len(set(other["content_hash"].to_pylist())) == 3


def test_a_column_that_cannot_hold_its_values_is_named():
    wrong: dict[str, Any] = {"response_tokens": (2**31,), "ref_logps": (None,), "slot": 2**31, "prompt": "\ud800"}
    for name, value in wrong.items():
        with pytest.raises(DataError, match=f"column '{name}' cannot hold"):
            to_table([replace(make_trajectory(), **{name: value})], run="r", searcher=0, seq=0)


def test_shards_of_one_row_group_and_of_several_are_the_same_to_a_reader():
    table = to_table(make_shard({f"p{n}": [0.0] * 20 for n in range(30)}), run="r", searcher=0, seq=0)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=1024, compression="zstd", write_page_checksum=True)
    assert pq.ParquetFile(pa.BufferReader(encode(table))).num_row_groups > 1
    assert decode(encode(table)) == decode(sink.getvalue().to_pybytes()) == table


def test_some_columns_can_be_read_alone():
    data = encode(to_table(make_shard({"a": [0.0]}), run="r", searcher=0, seq=0))
    assert decode(data, ["reward", "prompt_id"]).column_names == ["reward", "prompt_id"]
