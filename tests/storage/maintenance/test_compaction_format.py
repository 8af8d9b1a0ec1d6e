"""The format of a compaction's object, tested without a run."""

import pyarrow as pa
import pytest

from storage import layout
from storage.log.schema import TRAJECTORY_SCHEMA
from storage.log.sync_records import Shard
from storage.maintenance.compaction_format import Admitted, decode_object, encode_object, misfit
from tba.errors import Damaged


def rows(number: int, **added: pa.Array) -> pa.Table:
    table = pa.table({field.name: pa.nulls(number, field.type) for field in TRAJECTORY_SCHEMA})
    for name, values in added.items():
        table = table.append_column(name, values)
    return table


def admitted(seq: int, number: int) -> Admitted:
    shard = Shard(key=layout.shard(0, seq), searcher=0, seq=seq, rows=number, bytes=1, sha256="0" * 64)
    return Admitted(shard, sync=seq, step=2 * seq)


def test_an_object_says_itself_which_compaction_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.maintenance.compaction_format.ROWS", 2)
    shards = [admitted(1, 3), admitted(2, 2)]
    made, data = encode_object("first", shards, [rows(3), rows(2)], generation=4, retention=[7])
    assert [(part.sync, part.step, part.groups) for part in made.parts] == [(1, 2, range(2)), (2, 4, range(2, 3))]
    assert (made.generation, made.retention, made.bytes) == (4, (7,), len(data))
    read = decode_object(data, made.object)
    assert (read.parts, read.sha256, read.generation, read.retention) == (made.parts, made.sha256, 4, (7,))


def test_an_object_under_another_name_and_what_is_no_object_are_damaged():
    made, data = encode_object("first", [admitted(1, 1)], [rows(1)], generation=1, retention=[])
    with pytest.raises(Damaged):
        decode_object(data, layout.compaction(1, 2, made.sha256).object)
    with pytest.raises(Damaged):
        decode_object(data[:-1], made.object)


def test_columns_of_a_task_fit_unless_they_have_a_name_of_ours_or_another_type():
    mine = rows(1, toxicity=pa.array([0.5]))
    assert misfit(mine, []) == misfit(mine, [rows(1), rows(1, toxicity=pa.array([0.1]))]) == ""
    assert "'toxicity'" in misfit(mine, [rows(1, toxicity=pa.array(["much"]))])
    assert "'Version_Step'" in misfit(rows(1, Version_Step=pa.array([1])), [])
