"""For any bytes in a store, readers answer or name the damaged object. They never hang or raise another error."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.planning.run_summary import summarise
from storage.maintenance.check import check
from storage.queries.views import connect
from storage.runs.run import Run
from tba.errors import TBAError
from tests.support.faults.readers import READERS, make_whole_run

DAMAGED: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    1e308,
    "",
    "x" * 1000,
    "../../../../etc/passwd",
    "\x00",
    [],
    {},
    [[]],
]
NO_RECORDS = [b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"PAR1" * 3, b"1e999"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_whole_run(tmp_path_factory.mktemp("root"))


def read_views(run: Run) -> None:
    con = connect(run)
    for (view,) in con.execute("show tables").fetchall():
        con.execute(f"from {view}").fetchall()


ALL = (check, read_views, summarise)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in a record, as the keys that lead there."""
    yield above
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*above, key))


def changed_record(data: bytes, draw: st.DataObject) -> bytes:
    """Return a record with one value or one key changed."""
    record = json.loads(data)
    *above, last = draw.draw(st.sampled_from([it for it in places(record) if it]))
    inside = record
    for key in above:
        inside = inside[key]
    if isinstance(last, str) and draw.draw(st.booleans()):
        inside[f"{last}x"] = inside.pop(last)
    else:
        inside[last] = draw.draw(st.sampled_from(DAMAGED))
    return json.dumps(record).encode()


def changed_bytes(data: bytes, draw: st.DataObject) -> bytes:
    """Return bytes that are truncated, replaced, or changed in some places."""
    kind = draw.draw(st.sampled_from(["cut", "other", "bytes"]))
    if kind == "cut" or not data:
        return data[: draw.draw(st.integers(0, max(0, len(data) - 1)))]
    if kind == "other":
        return draw.draw(st.sampled_from(NO_RECORDS))
    found = bytearray(data)
    for place in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=8)):
        found[place] = draw.draw(st.integers(0, 255))
    return bytes(found)


def examples(number: int) -> settings:
    unchecked = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=number, deadline=None, suppress_health_check=unchecked)


@pytest.mark.parametrize("kind", sorted(READERS))
@examples(6)
@given(draw=st.data())
def test_an_object_with_other_bytes_is_read_or_named(run: Run, kind: str, draw: st.DataObject):
    read_or_name(run, kind, draw)


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(READERS))
@examples(50)
@given(draw=st.data())
def test_an_object_with_any_other_bytes_is_read_or_named(run: Run, kind: str, draw: st.DataObject):
    read_or_name(run, kind, draw)


def read_or_name(run: Run, kind: str, draw: st.DataObject) -> None:
    files = sorted(path for path in Path(run.url).rglob("*") if path.is_file() and f"/{kind}" in str(path))
    path = draw.draw(st.sampled_from(files))
    whole = path.read_bytes()
    is_record = path.suffix == ".json" and path.name != "config.json" and draw.draw(st.booleans())
    path.write_bytes(changed_record(whole, draw) if is_record else changed_bytes(whole, draw))
    try:
        for read in [READERS[kind], draw.draw(st.sampled_from(ALL))]:
            try:
                read(run)
            except TBAError as error:
                assert str(error)
                assert kind == "run.json" or read not in (read_views, summarise), "both go on without an object"
    finally:
        path.write_bytes(whole)
