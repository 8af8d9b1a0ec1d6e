"""Queries give the same answers on every store, and keep copies of a remote run's objects on this machine."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import storage
from storage import layout
from storage.log.compactions import is_record
from storage.log.trajectories import Trajectories
from storage.maintenance.compactor import compact
from storage.objects.store import Entry, Store
from storage.queries import mirror
from storage.runs.events import Events
from storage.runs.run import Run
from tests.support.builders import make_shard
from tests.support.sampled_parameters import sampled
from tests.support.storage.synthetic import PROMPTS, STEPS, B, K, S, make_live_run, make_run
from tests.support.storage.views import rows


def test_the_same_answers_come_from_every_store(root: str):
    con = storage.connect(make_run(root))
    assert rows(con, "select count(*), sum(reward) > 0 from trajectories") == [(7 * 2 * 2 * S, True)]
    assert rows(con, "select count(*) from draws_all") == [((STEPS + 2) * B * K,)]
    assert rows(con, "select max(version) from versions where state = 'kept'") == [(4,)]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_of_a_remote_run_only_what_is_new_is_copied_and_no_weights(root: str, cache: Path):
    run = make_live_run(root, "lean")
    copied: list[tuple[int, int]] = []
    storage.connect(run, progress=lambda done, total: copied.append((done, total)))
    assert copied[-1][0] == copied[-1][1] > 10
    names = {path.name for path in cache.rglob("*") if "lean-" in str(path)}
    assert any(name.startswith("MANIFEST.json") for name in names)
    assert not any("safetensors" in name for name in names)

    Trajectories(run).append(0, 99, make_shard({PROMPTS[0]: [1.0]}, round=99))
    copied.clear()
    con = storage.connect(run, progress=lambda done, total: copied.append((done, total)))
    assert copied == [(1, 1)]
    assert rows(con, "select count(*) from trajectories where seq = 99") == [(1,)]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_copy_that_has_changed_is_made_anew(root: str, cache: Path):
    run = make_live_run(root, "rotten")
    truth = {path: path.read_bytes() for path in copies_of(cache, run, connect=True)}
    record, steps, prompts = (
        next(path for path in truth if name in str(path))
        for name in (layout.sync(1), layout.steps(1, 1), layout.prompts("train"))
    )
    record.write_bytes(truth[record].replace(b'"step": 2', b'"step": 7'))  # of the same size
    steps.write_bytes(truth[steps][:-1] + b"x")
    prompts.write_bytes(b"short")
    assert rows(storage.connect(run), "select step from syncs where sync = 1") == [(2,)]
    assert {path: path.read_bytes() for path in copies_of(cache, run)} == truth


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_copies_of_runs_that_nobody_asks_for_are_forgotten(root: str, cache: Path):
    runs = [Run.create(root, name, config={}, sampler_sql="", code_version="") for name in ("old", "newer", "newest")]
    for run, days in zip(runs, (31, 29, 0), strict=True):
        Events(run, "trainer", 1).write("started", "hello")
        [copy] = copies_of(cache, run, connect=True)
        then = time.time() - days * 24 * 3600
        os.utime(next(path for path in copy.parents if path.parent.name == "runs"), (then, then))
    nobodys = cache / "runs" / "photos-2019"
    nobodys.mkdir()
    os.utime(nobodys, (0, 0))
    storage.connect(runs[2])
    assert nobodys.exists()
    assert [len(copies_of(cache, run)) for run in runs] == [0, 1, 1]


class Behind:
    """A store whose listings still show deleted objects."""

    def __init__(self, store: Store):
        self.store, self.gone = store, set[Entry]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def delete(self, key: str) -> None:
        self.gone |= {entry for entry in self.store.list(key) if entry.key == key}
        self.store.delete(key)

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        shown = (entry for entry in self.gone if entry.key.startswith(prefix) and entry.key > after)
        return sorted({*self.store.list(prefix, after=after), *shown})


@pytest.mark.parametrize(
    ("root", "what"),
    sampled(
        [("moto", "shard"), ("moto", "object"), ("moto", "record"), ("local", "record")],
        kept=[("local", "record")],
    ),
    indirect=["root"],
)
def test_what_a_listing_shows_for_ever_although_it_is_gone_is_missing(
    root: str, what: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirror, "PAUSES", (0.0, 0.01))
    run = make_run(root, f"behind-{what}")
    store = Behind(run.store)
    lost = layout.shard(0, 0)
    if what != "shard":
        compact(run, keep_checkpoints=1)
        [lost] = [it.key for it in store.list(layout.COMPACTIONS) if is_record(it.key) == (what == "record")]
    store.delete(lost)
    con = storage.connect(replace(run, store=cast(Store, store)))
    missing = rows(con, "select key from shards where state = 'missing' order by key")
    admitted = rows(con, "select key from shards where sync is not null order by key")
    assert missing == ([(lost,)] if what == "shard" else admitted)
    assert len(rows(con, "select trajectory_id from trajectories")) == 2 * S * (13 if what == "shard" else 2)


@pytest.mark.long
@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_copies_of_rows_that_were_compacted_are_forgotten_after_an_hour(root: str, cache: Path):
    run = make_run(root, "twice")
    made = {*copies_of(cache, run, connect=True)}
    for keep in (2, 1):
        compact(run, keep_checkpoints=keep)
        made |= {*copies_of(cache, run, connect=True)}
    assert {*copies_of(cache, run)} == made  # another process may be about to open them
    for copy in made:
        os.utime(copy, (time.time() - 3700, time.time() - 3700))
    con = storage.connect(run)
    kinds = (layout.TRAJECTORIES, layout.COMPACTIONS)
    kept = [path for path in copies_of(cache, run) if any(f"/{kind}" in str(path) for kind in kinds)]
    assert len(kept) == sum(len(run.store.list(kind)) for kind in kinds) == 4
    assert len(made) - len(copies_of(cache, run)) == 12 + 2
    assert len(rows(con, "select response_tokens from trajectories")) == 14 * 2 * S


def copies_of(cache: Path, run: Run, *, connect: bool = False) -> list[Path]:
    if connect:
        storage.connect(run)
    return [path for path in cache.glob(f"runs/{run.name}-*/**/*") if path.is_file()]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_new_run_under_an_old_name_is_not_mixed_with_copies_of_the_old_one(root: str):
    for message in ("old", "new"):  # of the same size, under the same name
        run = Run.create(root, "again", config={}, sampler_sql="", code_version="")
        Events(run, "trainer", 1).write("started", message)
        assert rows(storage.connect(run), "select message from events") == [(message,)]
        for entry in run.store.list():
            run.store.delete(entry.key)
