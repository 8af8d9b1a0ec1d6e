"""Rows of a data set from every kind of place."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.objects.datasets import read_rows
from storage.objects.store import Store
from tba.errors import DataError

ROWS: list[dict[str, Any]] = [{"question": "1+1?", "answer": "2", "n": 1}, {"question": "ü\n", "answer": "", "n": 2}]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def test_rows_of_every_format_come_from_every_store(store: Store, tmp_path: Path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    store.upload(tmp_path / "rows.parquet", "data/rows.parquet")
    store.create("data/rows.jsonl", lines(ROWS))
    store.create("data/rows.json", lines(ROWS) + b"\n\n")
    for name in ("rows.parquet", "rows.jsonl", "rows.json"):
        url = f"{store.url}/data/{name}"
        assert read_rows(url) == ROWS
        assert read_rows(url, limit=1) == ROWS[:1]
        assert read_rows(url, limit=0) == []


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_star_stands_for_several_files_in_the_order_of_their_names(store: Store, tmp_path: Path, suffix: str):
    for name, rows in (("train-1", ROWS[1:]), ("train-0", ROWS[:1]), ("test-0", ROWS)):
        file = tmp_path / f"{name}.{suffix}"
        if suffix == "jsonl":
            file.write_bytes(lines(rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)
        store.upload(file, f"data/{file.name}")
        store.upload(file, f"data/deeper/{file.name}")
    assert read_rows(f"{store.url}/data/train-*.{suffix}") == ROWS
    assert read_rows(f"{store.url}/data/train-*.{suffix}", limit=1) == ROWS[:1]
    with pytest.raises(DataError, match=r"valid-\*\..* cannot be read: no such file"):
        read_rows(f"{store.url}/data/valid-*.{suffix}")


def test_a_path_is_taken_as_it_is_but_for_stars(tmp_path: Path):
    for name in ("x::y.jsonl", "run[1]-0.jsonl", "run[1]-1.jsonl", "run1-2.jsonl", "what?.jsonl"):
        (tmp_path / name).write_bytes(lines([{"of": name}]))
    assert read_rows(f"{tmp_path}/x::y.jsonl") == [{"of": "x::y.jsonl"}]
    assert read_rows(f"{tmp_path}/run[1]-*.jsonl") == [{"of": "run[1]-0.jsonl"}, {"of": "run[1]-1.jsonl"}]
    assert read_rows(f"{tmp_path}/*t?.jsonl") == [{"of": "what?.jsonl"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_only_the_fields_that_are_asked_for_are_read(tmp_path: Path, suffix: str):
    """A column of tokens would be a hundred times as large as the text."""
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    found = read_rows(str(tmp_path / f"rows.{suffix}"), fields=("answer", "none"))
    assert found == [{"answer": "2"}, {"answer": ""}]


def test_a_file_url_is_read(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    assert read_rows(f"file://{tmp_path}/rows.jsonl") == ROWS


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(rows=st.lists(st.dictionaries(st.text(max_size=5), values, max_size=3), max_size=5))
def test_json_lines_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]):
    path = tmp_path_factory.getbasetemp() / "exact.jsonl"
    path.write_bytes(lines(rows))
    assert read_rows(str(path)) == rows


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("x.jsonl", b'{"a": 1}\n\n{"a": \n', "x.jsonl line 3 is not JSON"),
        ("x.jsonl", b'{"a": 1}\n{"a": ' + b"[" * 100_000, "x.jsonl line 2 is not JSON"),
        ("x.json", b'[{"a": 1}]', "x.json line 1 is a list"),
        ("x.jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 3}', "^[^:]*x.jsonl line 2: key 'a' is given more than once$"),
        ("x.jsonl", b'{"a": {"b": [{"c": 1, "c": 1}]}}', "^[^:]*x.jsonl line 1: key 'c' is given more than once$"),
        ("x.jsonl", b'{"a": 1}\n\xff\n', "x.jsonl line 2 is not JSON"),
        ("x.parquet", b"PAR1 no more", "x.parquet is not a readable Parquet object"),
        ("x.csv", b"a,b", r"x.csv: rows come from .jsonl, .json, .parquet"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, fault: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=fault):
        read_rows(str(tmp_path / name))


def test_a_flipped_bit_of_a_parquet_file_raises_nothing_but_a_data_error(tmp_path: Path):
    path, chance = tmp_path / "rows.parquet", random.Random(0)
    pq.write_table(pa.table({"question": [f"question {n}" for n in range(500)]}), path)
    whole, refused = path.read_bytes(), 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            read_rows(str(path))  # another program wrote it: its pages may have no checksums
        except DataError as error:
            assert "rows.parquet" in str(error)
            refused += 1
    assert refused > 50


def test_what_is_not_there_is_named(store: Store):
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read"):
        read_rows(f"{store.url}/none.jsonl")
    with pytest.raises(DataError, match=r"nowhere://x/rows\.jsonl"):
        read_rows("nowhere://x/rows.jsonl")
