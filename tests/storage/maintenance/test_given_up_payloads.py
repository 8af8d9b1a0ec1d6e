"""Payloads that were given up are known and refused by name. What a fork may draw is not given up."""

from pathlib import Path

import pytest

import storage
from storage import layout
from storage.log.compactions import PAYLOAD
from storage.maintenance.check import check
from storage.runs import retention
from storage.runs.forks import unregister
from storage.runs.retention import given_up_payloads, in_the_way
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tests.support.sampled_parameters import sampled
from tests.support.storage.compacted import CAPACITY, compacted, drawn, loose, objects, replayed, tables
from tests.support.storage.synthetic import LAST_SYNC, make_run
from tests.support.storage.synthetic_forks import fork

local = pytest.mark.parametrize("root", ["local"], indirect=True)
on_disk_and_s3 = pytest.mark.parametrize("root", sampled(["local", "moto"], kept=["local"]), indirect=True)


# --- payloads ---------------------------------------------------------------------------------------------------------


@on_disk_and_s3
def test_rows_that_cannot_be_drawn_any_more_lose_their_tokens_and_nothing_else(root: str):
    run = make_run(root)
    before = tables(run, without=PAYLOAD)
    buffer = replayed(run, capacity=CAPACITY)
    pool = buffer.index.pool.table()
    eligible = sum(pool["drawable"].to_pylist())
    draws = drawn(buffer, range(9, 40))
    done = compacted(run, drop_beyond=CAPACITY)
    assert done.payloads_given_up == 72 - eligible > 0
    assert tables(run, without=PAYLOAD) == before
    with storage.connect(run) as con:
        for column in PAYLOAD:
            count = f"select count(*) from trajectories where {column} is null"
            assert con.execute(count).fetchall() == [(72 - eligible,)]
    assert drawn(replayed(run, capacity=CAPACITY), range(9, 40)) == draws
    [record] = given_up_payloads(run)
    assert (record.number, record.payloads.columns, record.payloads.step) == (done.retention, PAYLOAD, 8)
    assert check(run).problems == []
    assert compacted(run, drop_beyond=CAPACITY).written == []
    assert len(given_up_payloads(run)) == 1


@local
@pytest.mark.parametrize("damage", ["manifest", "gone", "short"])
def test_nothing_is_given_up_behind_a_checkpoint_that_nobody_could_go_on_from(root: str, damage: str):
    run = make_run(root)
    before = {key: run.store.read(key) for key in loose(run)}
    [folder] = sorted(Path(run.url, "checkpoints").iterdir())[-1:]
    manifest = folder / "MANIFEST.json"
    [file, *_] = [path for path in folder.iterdir() if path != manifest]
    if damage == "manifest":
        manifest.write_text("{}")
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        Damaged, match=f"checkpoints/{folder.name}/{manifest.name if damage == 'manifest' else file.name}"
    ):
        compacted(run, drop_beyond=CAPACITY)
    assert {key: run.store.read(key) for key in loose(run)} == before and not run.store.list(layout.RETENTION)


@local
def test_where_the_worst_are_evicted_others_lose_their_tokens(root: str, tmp_path: Path):
    run, other = make_run(root), make_run(str(tmp_path))
    buffer = replayed(run, capacity=CAPACITY, evict="worst")
    pool = buffer.index.pool.table()
    draws = drawn(buffer, range(9, 40))
    done = compacted(run, drop_beyond=CAPACITY, evict="worst")
    assert done.payloads_given_up == 72 - sum(pool["drawable"].to_pylist()) > 0
    assert drawn(replayed(run, capacity=CAPACITY, evict="worst"), range(9, 40)) == draws
    assert [it.payloads.eligibility.evict for it in given_up_payloads(run)] == ["worst"]
    assert check(run).problems == []
    compacted(other, drop_beyond=CAPACITY)
    with pytest.raises(Missing, match="have been given up"):
        drawn(replayed(other, capacity=CAPACITY, evict="worst"), range(9, 40))


@local
def test_what_has_become_too_old_loses_its_tokens(root: str):
    run, rule = make_run(root), {"max_age": 3}
    buffer = replayed(run, **rule)
    buffer.draw(9)
    drawable = {it for places in (buffer.index.pool.places([n])[0] for n in range(6)) for it in places.tolist()}
    draws = drawn(replayed(run, **rule), range(9, 10))
    done = compacted(run, drop_beyond=100, **rule)
    assert done.payloads_given_up == len(buffer.index.pool.rows) - len(drawable) > 0
    assert compacted(run, drop_beyond=100, **rule).written == []
    assert drawn(replayed(run, **rule), range(9, 10)) == draws
    assert [it.payloads.eligibility.max_age for it in given_up_payloads(run)] == [3]
    with pytest.raises(Missing, match="have been given up"):
        drawn(replayed(run), range(9, 40))
    assert check(run).problems == []


@local
def test_tokens_that_were_given_up_are_missing_by_name_and_the_record_says_for_which_steps(root: str):
    run = make_run(root)
    compacted(run, drop_beyond=CAPACITY)
    with pytest.raises(Missing, match=r"seq=00000000\.parquet: the tokens of row \d have been given up"):
        drawn(replayed(run, 0), range(1, 9))
    assert in_the_way(run, 2, 3) and in_the_way(run, 0, 0)
    assert not in_the_way(run, 4, 4)


@local
def test_payloads_are_given_up_of_what_was_compacted_before(root: str):
    run = make_run(root)
    compacted(run)
    once = compacted(run, drop_beyond=4)
    more = compacted(run, drop_beyond=CAPACITY)
    assert once.payloads_given_up > 0 < more.payloads_given_up
    assert len(objects(run)) == 1
    assert len(given_up_payloads(run)) == 2
    assert check(run).problems == []


@local
def test_tokens_that_lack_without_a_record_that_gives_them_up_are_a_problem(root: str):
    run = make_run(root)
    compacted(run, drop_beyond=CAPACITY)
    Path(run.url, layout.retention(1)).unlink()
    assert any("no retention record gives these up" in it.problem for it in check(run).problems)


# --- forks ------------------------------------------------------------------------------------------------------------


@local
@pytest.mark.parametrize(("sync", "replays", "first"), [(2, None, 3), (0, 4, 5), (0, None, 1)])
def test_what_a_fork_may_draw_is_not_given_up(root: str, sync: int, replays: int | None, first: int):
    parent = make_run(root)
    run = fork(parent, sync, replays=replays)
    before = tables(run)["trajectories"]
    compacted(parent, drop_beyond=CAPACITY)
    assert tables(run)["trajectories"] == before
    assert [it.payloads.first_sync for it in given_up_payloads(parent)] == ([first] if first <= LAST_SYNC else [])
    assert not in_the_way(run, sync, sync)
    assert check(run).problems == check(parent).problems == []


@local
def test_a_fork_of_what_has_been_given_up_is_refused(root: str):
    parent = make_run(root)
    compacted(parent, drop_beyond=CAPACITY)
    with pytest.raises(
        Missing, match=r"retention/000001\.json of .* has given up tokens that a fork from step 4 draws"
    ):
        fork(parent, 2)
    assert not parent.store.exists(layout.fork("fork"))
    fork(parent, 4)


@local
@pytest.mark.parametrize("moment", ["before the record of it", "after the record of it"])
def test_giving_up_and_forking_at_once_leave_the_payloads_or_refuse_the_fork(
    root: str, monkeypatch: pytest.MonkeyPatch, moment: str
):
    parent = make_run(root)
    made: list[Run] = []
    refused: list[Missing] = []
    give_up = retention.give_up

    def attempt() -> None:
        try:
            made.append(fork(parent, 2))
        except Missing as error:
            refused.append(error)

    def meanwhile(*arguments, **named) -> int:
        if moment.startswith("before"):
            attempt()
        number = give_up(*arguments, **named)
        if moment.startswith("after"):
            attempt()
        return number

    monkeypatch.setattr(retention, "give_up", meanwhile)
    compacted(parent, drop_beyond=CAPACITY)
    assert len(made) + len(refused) == 1
    for run in made:
        with storage.connect(run) as con:
            assert con.execute("select count(*) from trajectories where response_tokens is null").fetchall() == [(0,)]
    assert check(parent).problems == []


@local
def test_once_a_fork_is_gone_its_payloads_can_be_given_up(root: str):
    parent = make_run(root)
    fork(parent, 4)
    assert compacted(parent, drop_beyond=CAPACITY).payloads_given_up == 0
    unregister(parent, layout.fork("fork"))
    assert compacted(parent, drop_beyond=CAPACITY).payloads_given_up > 0
