"""Where the ranks of an attempt meet."""

from pathlib import Path

import pytest

from storage import layout
from storage.maintenance.check import check
from storage.objects import records
from storage.runs.rendezvous import Rendezvous, announce, find_rendezvous, most_ranks, newest_rendezvous
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.errors import AlreadyExists, Damaged
from tests.support.faults.rewriting import rewrite
from tests.support.storage.synthetic import copy_run, make_run

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def made(attempt: int, **changes: object) -> Rendezvous:
    said = {"address": "10.0.0.1", "port": 29500, "size": 4, "token": f"of {attempt}", "created_at": records.now()}
    return Rendezvous(attempt=attempt, **{**said, **changes})  # pyright: ignore[reportArgumentType]


def test_ranks_find_the_newest_attempt_alone(run: Run):
    assert newest_rendezvous(run) is None
    first, second = claim_attempt(run).number, made(2, size=2)
    announce(run, made(first))
    assert newest_rendezvous(run) == find_rendezvous(run, 1)
    claim_attempt(run)
    assert newest_rendezvous(run) is None  # although the first trainer may still be there
    announce(run, second)
    assert newest_rendezvous(run) == second
    assert most_ranks(run) == 4


@local
def test_an_attempt_has_one_meeting_place(run: Run):
    announce(run, made(1))
    with pytest.raises(AlreadyExists, match="0001"):
        announce(run, made(1, address="10.0.0.2"))


@pytest.mark.parametrize(("changes", "named"), [({"port": "29500"}, "port"), ({"attempt": 7}, "another attempt, 7")])
def test_a_record_that_says_something_else_is_refused_and_found(tmp_path: Path, changes: dict, named: str):
    run = copy_run(make_run(str(tmp_path)), tmp_path / "copy")
    announce(run, made(2))
    assert check(run).problems == []
    rewrite(Path(run.url, layout.rendezvous(2)), **changes)
    with pytest.raises(Damaged, match=named):
        find_rendezvous(run, 2)
    assert [it.key for it in check(run).problems] == [layout.rendezvous(2)]


def test_a_record_that_was_changed_is_found(tmp_path: Path):
    run = make_run(str(tmp_path))
    announce(run, made(2))
    path = Path(run.url, layout.rendezvous(2))
    path.write_bytes(path.read_bytes().replace(b"10.0.0.1", b"10.0.0.9"))
    assert [it.key for it in check(run).problems] == [layout.rendezvous(2)]
