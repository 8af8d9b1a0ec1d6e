import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import pytest

from storage import layout
from storage.log.sync_records import Refusal, Shard, SyncRecord, encode, read_chain, read_record
from storage.runs.run import Run
from tba.errors import Damaged
from tests.support.faults.rewriting import with_digest

pytestmark = pytest.mark.parametrize("root", ["local"], indirect=True)

SHARD = Shard(key=layout.shard(0, 0), searcher=0, seq=0, rows=3, bytes=100, sha256="ab")


def make_record(sync: int, previous: str | None = None, **changes: Any) -> SyncRecord:
    fields: dict[str, Any] = {
        "step": 2 * sync,
        "attempt": 1,
        "shards": [SHARD],
        "rows": 3,
        "refused": [Refusal(key=layout.shard(1, 0), reason="it has no rows")],
        "created_at": "2026-01-01T00:00:00+00:00",
    }
    return SyncRecord(sync=sync, previous_sha256=previous, **{**fields, **changes})


def store_chain(run: Run, n: int) -> list[SyncRecord]:
    records, previous = [], None
    for sync in range(n):
        records.append(make_record(sync, previous))
        data = encode(records[-1])
        run.store.create(layout.sync(sync), data)
        previous = sha256(data).hexdigest()
    return records


def overwrite(run: Run, key: str, changes: Mapping[str, Any]) -> None:
    found = run.store.read_tagged(key)
    assert found is not None
    run.store.replace(key, with_digest({**json.loads(found[0]), **changes}), tag=found[1])


def test_records_come_back_exactly(run: Run):
    records = store_chain(run, 3)
    assert read_chain(run) == records


def test_a_record_that_is_not_there_is_none(run: Run):
    assert read_record(run, 0, previous_sha256=None) is None


def test_each_record_names_the_bytes_of_the_one_before(run: Run):
    store_chain(run, 2)
    first = read_record(run, 0, previous_sha256=None)
    assert first is not None
    second = read_record(run, 1, previous_sha256=first.sha256)
    assert second is not None and second.record.previous_sha256 == first.sha256


def test_a_record_whose_predecessor_was_changed_is_damaged(run: Run):
    store_chain(run, 3)
    overwrite(run, layout.sync(1), {"created_at": "2027-01-01T00:00:00+00:00"})
    with pytest.raises(Damaged, match=r"syncs/000002\.json does not continue record 1"):
        read_chain(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": 7}, "says it is record 7"),
        ({"rows": 4}, "says 4 rows, but its shards have 3"),
        ({"shards": [{"key": "x"}]}, "missing"),
        ({"shards": [{**asdict(SHARD), "rows": "3"}]}, "cannot be decoded"),
        ({"shards": 3}, "not iterable"),
        ({"refused": [{"key": "x", "why": "y"}]}, "reason"),
    ],
)
def test_a_record_that_contradicts_itself_is_damaged(run: Run, changes: Mapping[str, Any], message: str):
    store_chain(run, 1)
    overwrite(run, layout.sync(0), changes)
    with pytest.raises(Damaged, match=r"syncs/000000\.json") as damaged:
        read_record(run, 0, previous_sha256=None)
    assert message in str(damaged.value)
