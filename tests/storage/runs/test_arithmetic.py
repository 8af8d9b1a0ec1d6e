"""How attempts computed."""

from pathlib import Path

import pytest

import storage
from storage import layout
from storage.maintenance.check import check
from storage.runs.arithmetic import Arithmetic, find_arithmetic, note_arithmetic
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged
from tests.support.faults.rewriting import rewrite
from tests.support.storage.synthetic import COMPUTED, copy_run, make_run

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def test_an_attempt_says_once_how_it_computed(run: Run):
    assert find_arithmetic(run, 1) is None
    note_arithmetic(run, 1, COMPUTED)
    assert find_arithmetic(run, 1) == COMPUTED
    with pytest.raises(AlreadyExists, match="0001"):
        note_arithmetic(run, 1, COMPUTED)


def test_the_threads_of_a_cpu_are_named():
    assert str(COMPUTED) == "bfloat16 on cpu with 3 threads, torch 2.13.0"
    assert str(Arithmetic(compute_dtype="float32", device="cuda", threads=1, torch="3")) == "float32 on cuda, torch 3"


def test_the_view_of_attempts_has_it_where_it_is_stored(tmp_path: Path):
    """The first attempt of the run has no record, as in older runs."""
    with storage.connect(make_run(str(tmp_path))) as con:
        found = con.execute("select attempt, compute_dtype, device, threads, torch from attempts order by 1").fetchall()
    assert found == [(1, None, None, None, None), (2, "bfloat16", "cpu", 3, "2.13.0")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"threads": "3"}, "threads"), ({"attempt": 7}, "another attempt, 7"), ({"threads": 2**70}, "")],
)
def test_a_record_that_says_something_else_is_refused_and_found(tmp_path: Path, changes: dict, named: str):
    run = copy_run(make_run(str(tmp_path)), tmp_path / "copy")
    assert check(run).problems == []
    key = layout.arithmetic(2)
    rewrite(Path(run.url, key), **changes)
    if named:
        with pytest.raises(Damaged, match=named):
            find_arithmetic(run, 2)
    assert [it.key for it in check(run).problems] == [key]
    with storage.connect(run) as con:
        assert con.execute("select key from damage").fetchall() == [(key,)]
        assert con.execute("select attempt from attempts order by 1").fetchall() == [(1,), (2,)]
