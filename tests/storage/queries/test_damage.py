"""Damage to one object stops no query and hides no other object. The view `damage` has a row for each damaged
object."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import duckdb
import pytest

import storage
from storage import layout
from storage.local_files import remembered_reads
from storage.local_files.regular_files import sha256_of_file
from storage.local_files.remembered_reads import RememberedReads
from storage.log.compactions import is_record
from storage.maintenance.compactor import compact
from storage.objects.digests import Digest
from storage.objects.store import Entry, Store
from storage.queries import mirror
from storage.queries.file_comparison import verify
from storage.runs.run import Run
from tba.types import Version
from tests.support.faults.object_damage import DAMAGES, HOLDING, MAY_BE_GONE, flip
from tests.support.faults.rewriting import with_digest
from tests.support.sampled_parameters import sampled
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import LAST_SYNC, S, copy_run, make_live_run, make_run, prune_version
from tests.support.storage.synthetic_forks import fork, go_on
from tests.support.storage.views import VIEWS

pytestmark = pytest.mark.usefixtures("short_pauses")
PRUNED = (Version(1, 1), Version(3, 1))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run that many tests read and none changes."""
    run = make_run(str(tmp_path_factory.mktemp("root")))
    for version in PRUNED:
        prune_version(run, version)
    return run


@pytest.fixture(scope="module")
def before(finished: Run) -> dict[str, int]:
    """Return the number of rows of each view without damage."""
    with storage.connect(finished) as con:
        return counts(con)


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    return copy_run(finished, tmp_path)


def counts(con: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Read every view completely, and return the number of its rows."""
    return {view: len(con.execute(f"from {view}").fetchall()) for view in VIEWS if view != "damage"}


def damage_of(run: Run) -> dict[str, str]:
    with storage.connect(run) as con:
        return dict(con.execute("from damage").fetchall())


def changed(run: Run, key: str, **fields: Any) -> None:
    record = json.loads(path_of(run, key).read_bytes())
    path_of(run, key).write_bytes(with_digest({**record, **fields}))


NOTICED = [
    (key, how)
    for key, (another, _) in HOLDING.items()
    for how in DAMAGES
    if not (how == "another" and not another) and not (how == "removed" and key in MAY_BE_GONE)
]


@pytest.mark.parametrize(("key", "how"), sampled(NOTICED, kept=NOTICED[::4]))
def test_an_object_that_is_damaged_is_named_and_all_others_are_there(
    before: dict[str, int], whole: Run, key: str, how: str
):
    another, held = HOLDING[key]
    DAMAGES[how](path_of(whole, key), path_of(whole, another) if another else None)
    with storage.connect(whole) as con:
        assert [named for (named,) in con.execute("select key from damage").fetchall()] == [key]
        assert counts(con) == {view: rows - held.get(view, 0) for view, rows in before.items()}


def test_a_run_without_damage_has_none(finished: Run, tmp_path: Path):
    assert damage_of(finished) == damage_of(make_live_run(str(tmp_path))) == {}


# --- shards ---------------------------------------------------------------------------------------------------------


def test_another_object_under_the_name_of_an_admitted_shard_is_joined_to_no_draw(whole: Run):
    asked = "select count(*) from draws join trajectories using (trajectory_id) where trajectory_id like '0/1/%'"
    assert storage.connect(whole).execute(asked).fetchone() != (0,)
    shutil.copyfile(path_of(whole, layout.shard(0, 3)), path_of(whole, layout.shard(0, 1)))
    with storage.connect(whole) as con:
        assert con.execute(asked).fetchone() == (0,)
        [(state, reason)] = con.execute("select state, reason from shards where searcher = 0 and seq = 1").fetchall()
        assert state == "damaged" and "its record says" in reason


def test_an_admitted_shard_of_the_same_size_with_other_content_is_damaged(whole: Run):
    flip(path_of(whole, layout.shard(0, 1)), 400)
    differs = "does not have the content that its record promises (sha256 differs)"
    assert damage_of(whole) == {layout.shard(0, 1): differs}


def test_what_lies_beyond_the_bound_is_compared_by_size_alone_unless_all_is_asked_for(
    whole: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remembered_reads, "MOST_BYTES", 0)
    flip(path_of(whole, layout.shard(0, 0)), 41)  # a byte in a page of rows
    path_of(whole, layout.shard(0, 1)).write_bytes(b"short")
    path_of(whole, layout.draws(2, 1)).write_bytes(b"")
    sized = {layout.shard(0, 1), layout.draws(2, 1)}
    assert damage_of(whole).keys() == sized
    with storage.connect(whole, thorough=True) as con:
        assert {key for (key,) in con.execute("select key from damage").fetchall()} == {*sized, layout.shard(0, 0)}
        counts(con)


def test_a_bound_is_spent_on_the_newest_files_first(whole: Run):
    paths = {f"file {n}": path_of(whole, layout.shard(0, n)) for n in range(3)}
    room = sum(path.stat().st_size for path in list(paths.values())[1:])
    assert RememberedReads(whole.url, most=room).ask("sha256", paths, sha256_of_file).keys() == {"file 1", "file 2"}


def test_a_file_is_read_once_and_again_when_it_has_changed(whole: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remembered_reads, "SETTLED_SECONDS", -1e9)
    paths = {"shard": path_of(whole, layout.shard(0, 1))}
    read: list[Path] = []

    def reader(path: Path) -> str:
        read.append(path)
        return sha256_of_file(path)

    told: list[dict[str, str]] = []
    for _ in range(3):  # each time like a new process
        memory = RememberedReads(whole.url)
        told.append(memory.ask("sha256", paths, reader))
        memory.save()
    assert len(read) == 1 and told[0] == told[2]
    flip(paths["shard"], 400)
    assert RememberedReads(whole.url).ask("sha256", paths, reader) != told[0]


def test_a_file_that_has_just_changed_is_not_remembered(whole: Run):
    path = path_of(whole, layout.shard(0, 1))
    path.write_bytes(path.read_bytes())
    read: list[Path] = []
    for _ in range(2):
        memory = RememberedReads(whole.url)
        memory.ask("sha256", {"shard": path}, lambda path: read.append(path) or "")
        memory.save()
    assert len(read) == 2


def test_without_a_cache_folder_a_local_run_is_looked_at_all_the_same(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "file"))
    path_of(whole, layout.shard(0, 1)).unlink()
    assert damage_of(whole) == {layout.shard(0, 1): "is missing"}


def test_memories_that_make_no_sense_are_forgotten(whole: Run, cache: Path):
    RememberedReads(whole.url).save()
    for nonsense in (b"", b"[1]", b"{", b'{"a": 1}', b"7"):
        for file in (cache / "verified").iterdir():
            file.write_bytes(nonsense)
        assert damage_of(whole) == {}


def test_whoever_knows_what_an_object_must_be_can_have_it_compared(finished: Run):
    snapshot = mirror.take_snapshot(finished)
    keys = [layout.steps(1, 1), layout.draws(1, 1), layout.prompts("train"), "steps/nowhere"]
    known = {key: finished.store.read(key) for key in keys[:3]}
    digests = {key: sha256_of_file(path_of(finished, key)) for key in known}
    expectations = {key: Digest(len(data), digests[key]) for key, data in known.items()}
    expectations[keys[1]] = Digest(len(known[keys[1]]), digests[keys[0]])
    expectations[keys[2]] = Digest(1, digests[keys[2]])
    expectations[keys[3]] = Digest(1, digests[keys[0]])
    good, damage = verify(snapshot, expectations, RememberedReads(finished.url))
    assert good == {keys[0]}
    assert {it.key for it in damage} == {*keys[1:]}


# --- compactions ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compacted(whole: Run) -> Run:
    compact(whole, keep_checkpoints=1)
    return whole


def compaction(run: Run, *, record: bool) -> str:
    [key] = [it.key for it in run.store.list(layout.COMPACTIONS) if is_record(it.key) == record]
    return key


@pytest.mark.parametrize("how", ["cut", "emptied", "a list", "removed", "another", "flipped"])
def test_the_shards_of_a_damaged_compaction_are_left_out(compacted: Run, how: str):
    key, admitted = compaction(compacted, record=False), 12
    if how == "flipped":
        flip(path_of(compacted, key), 400)
    else:
        DAMAGES[how](path_of(compacted, key), path_of(compacted, layout.shard(0, 6)))
    with storage.connect(compacted) as con:
        [(named, problem)] = con.execute("from damage").fetchall()
        assert named == key and f"{admitted} shards lie in it" in problem
        state = "missing" if how == "removed" else "damaged"
        assert con.execute("select state, count(*) from shards where sync is not null group by 1").fetchall() == [
            (state, admitted)
        ]
        assert counts(con)["trajectories"] == 2 * 2 * S


@pytest.mark.parametrize("how", ["cut", "emptied", "a list", "another"])
def test_a_damaged_record_of_a_compaction_is_named_with_the_shards_that_are_gone(compacted: Run, how: str):
    key = compaction(compacted, record=True)
    DAMAGES[how](path_of(compacted, key), path_of(compacted, layout.sync(1)))
    found = damage_of(compacted)
    assert key in found and layout.shard(0, 0) in found and len(found) == 13


def test_a_shard_that_is_still_there_takes_the_place_of_a_damaged_compaction(before: dict[str, int], whole: Run):
    data = path_of(whole, layout.shard(0, 0)).read_bytes()
    compact(whole, keep_checkpoints=1)
    path_of(whole, layout.shard(0, 0)).write_bytes(data)
    path_of(whole, compaction(whole, record=False)).write_bytes(b"short")
    with storage.connect(whole) as con:
        assert con.execute("select state from shards where searcher = 0 and seq = 0").fetchall() == [("admitted",)]
        assert before["trajectories"] - counts(con)["trajectories"] == 11 * 2 * S


def test_a_fork_that_replays_misses_what_its_parent_has_compacted_and_lost(tmp_path: Path):
    parent = make_run(str(tmp_path))
    compact(parent, keep_checkpoints=1)
    run = fork(parent, 2, replays=LAST_SYNC)
    held = counts(storage.connect(run))["trajectories"]
    key = compaction(parent, record=False)
    path_of(parent, key).write_bytes(b"short")
    with storage.connect(run) as con:
        [(named, problem)] = con.execute("from damage").fetchall()
        assert named == key and "12 shards lie in it" in problem
        assert held - counts(con)["trajectories"] == 12 * 2 * S


@pytest.mark.parametrize("folder", [layout.TRAJECTORIES, layout.COMPACTIONS, layout.PROMPTS])
def test_what_is_compacted_while_it_is_looked_at_is_no_damage(before: dict[str, int], whole: Run, folder: str):
    """The compaction comes between the listing of a folder and the reading of its objects."""
    compact(whole, keep_checkpoints=2)

    class Live:
        done = False

        def __getattr__(self, name: str) -> Any:
            return getattr(whole.store, name)

        def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
            found = whole.store.list(prefix, after=after)
            if prefix == folder and not self.done:
                self.done = True
                compact(whole, keep_checkpoints=1)
            return found

    store = Live()
    with storage.connect(replace(whole, store=cast(Store, store))) as con:
        assert store.done
        assert con.execute("from damage").fetchall() == []
        assert counts(con) == before


# --- records --------------------------------------------------------------------------------------------------------


def test_of_two_records_that_do_not_fit_the_one_that_the_next_confirms_stays(whole: Run):
    for sync in (0, 2):
        changed(whole, layout.sync(sync), created_at="2026-01-01T00:00:00+00:00")
        found = damage_of(whole)
        assert found[layout.sync(sync)] == f"does not fit record {sync + 1}: one of the two was changed"
    assert len(found) == 2


def test_where_no_later_record_confirms_either_the_older_one_stays(whole: Run):
    changed(whole, layout.sync(4), previous_sha256="0" * 64)
    assert damage_of(whole) == {layout.sync(4): "does not fit record 3: one of the two was changed"}


def test_shards_that_a_damaged_record_may_have_admitted_say_so(whole: Run):
    path_of(whole, layout.sync(2)).write_text("[]")
    with storage.connect(whole) as con:
        found = con.execute("select seq, reason from shards where state = 'waiting' order by seq").fetchall()
    said = f"{layout.sync(2)} is damaged or missing, and may have admitted it"
    assert found == [(2, said), (2, said), (6, said), (6, said)]


def test_the_newest_record_is_missed_where_the_ledger_has_passed_it(whole: Run):
    path_of(whole, layout.sync(4)).unlink()
    assert damage_of(whole) == {layout.sync(4): "is missing, though later syncs are there"}


def test_without_the_record_of_an_attempt_its_ledger_says_what_counts(finished: Run, whole: Run):
    asked = "select step, attempt from steps order by step"
    for key in (layout.attempt(1), layout.attempt(2)):
        path_of(whole, key).unlink()
    assert damage_of(whole).keys() == {layout.attempt(1), layout.attempt(2)}
    assert storage.connect(whole).execute(asked).fetchall() == storage.connect(finished).execute(asked).fetchall()


def test_a_gap_in_the_ledger_and_in_what_was_given_up_is_named(whole: Run):
    for key in (layout.steps(2, 1), layout.draws(3, 2), layout.retention(1)):
        path_of(whole, key).unlink()
    assert damage_of(whole).keys() == {layout.steps(2, 1), layout.draws(3, 2), layout.retention(1)}


def test_a_ledger_of_which_only_the_draws_are_written_yet_is_no_gap(finished: Run, tmp_path: Path):
    live = make_live_run(str(tmp_path))
    shutil.copyfile(path_of(finished, layout.draws(3, 1)), Path(live.url) / layout.draws(3, 1))
    assert damage_of(live) == {}


def test_steps_that_were_written_after_their_records_were_listed_are_no_gap(tmp_path: Path):
    live = make_live_run(str(tmp_path))
    shutil.rmtree(Path(live.url, layout.CHECKPOINTS))
    for sync in (1, 2):
        path_of(live, layout.ledger(sync, 1)).unlink()
    assert damage_of(live) == {}


def test_a_ledger_record_is_missed_where_a_later_one_or_a_checkpoint_is_there(whole: Run):
    path_of(whole, layout.ledger(1, 1)).unlink()
    path_of(whole, layout.ledger(LAST_SYNC, 2)).unlink()
    assert damage_of(whole).keys() == {layout.ledger(1, 1), layout.ledger(LAST_SYNC, 2)}


@pytest.mark.parametrize(
    ("how", "replays"),
    sampled(
        [("cut", None), ("cut", LAST_SYNC), ("removed", None), ("removed", LAST_SYNC)],
        kept=[("cut", LAST_SYNC), ("removed", None)],
    ),
)
def test_a_damaged_record_of_a_parent_leaves_the_fork_with_everything_else(
    tmp_path: Path, replays: int | None, how: str
):
    parent = make_run(str(tmp_path))
    prune_version(parent, Version(1, 1))
    run = fork(parent, 2, replays=replays)
    if replays is None:
        go_on(run, 2)
    before = counts(storage.connect(run))
    lost = layout.sync(1)
    DAMAGES[how](path_of(parent, lost), None)
    path_of(parent, layout.retention(1)).write_bytes(b"")
    with storage.connect(Run.open(run.url)) as con:
        assert {key for (key,) in con.execute("select key from damage").fetchall()} == {lost, layout.retention(1)}
        after = counts(con)
    assert (after["steps"], after["syncs"]) == (before["steps"], before["syncs"] - 1)
    assert after["trajectories"] == before["trajectories"] - 2 * 2 * S  # without the record, their owner is unknown


# --- remote runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_damage_of_a_remote_run_is_found_by_what_its_copies_are_named(root: str):
    run = make_run(root)
    before = counts(storage.connect(run))
    data = run.store.read(layout.shard(1, 2))
    for key in (layout.shard(0, 1), layout.shard(0, 2), layout.evaluation(Version(2, 1)), layout.draws(2, 1)):
        run.store.delete(key)
    run.store.create(layout.shard(0, 1), data)
    run.store.create(layout.evaluation(Version(2, 1)), b"[]")
    run.store.create(layout.draws(2, 1), b"PAR1")
    with storage.connect(run) as con:
        found = dict(con.execute("select key, state from shards where state in ('damaged', 'missing')").fetchall())
        assert found == {layout.shard(0, 1): "damaged", layout.shard(0, 2): "missing"}
        named = {key for (key,) in con.execute("select key from damage").fetchall()}
        assert named == {*found, layout.evaluation(Version(2, 1)), layout.draws(2, 1)}
        assert before["trajectories"] - counts(con)["trajectories"] == 2 * 2 * S
