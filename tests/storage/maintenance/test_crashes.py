"""A trainer dies, or its successor overtakes it, at any of its writes: nothing is lost, doubled or left over."""

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
import pytest

from storage import layout
from storage.log.ledger import ParquetLedger
from storage.log.prompts import write_prompts
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.objects.store import Store
from storage.runs.attempts import chain
from storage.runs.events import read_events
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.versions import Versions
from tba.errors import Superseded
from tba.types import Version
from tests.support.builders import make_prompt, make_shard
from tests.support.faults.crashes import Killed, Watched
from tests.support.faults.uploads import begin_upload
from tests.support.storage.synthetic import EVERY, PROMPTS, SyntheticRun, fill

pytestmark = pytest.mark.slow

SYNCS = 2


def live(run: Run) -> None:
    """Store what a trainer stores in its life, with a checkpoint at every sync, of which one is kept."""
    made, checkpoints = SyntheticRun.of(run), Checkpoints(run)
    attempt = claim_attempt(run)
    buffer, ledger = made.buffer(attempt.number), ParquetLedger(run, attempt.number)
    first = 0
    if attempt.continues:
        first = attempt.continues.number
        for sync in range(first + 1):
            buffer.sync(sync, step=sync * EVERY)
        folder = checkpoints.load(*attempt.continues)
        buffer.restore(json.loads((folder / "queues.json").read_text()))
    made.publish(Version(first, attempt.number))
    if not attempt.continues:
        arrive(run, 0)
        buffer.sync(0, step=0)
    for sync in range(first + 1, SYNCS + 1):
        steps = range((sync - 1) * EVERY + 1, sync * EVERY + 1)
        records = [made.step(step, sync, buffer.draw(step), attempt.number) for step in steps]
        arrive(run, sync)
        buffer.sync(sync, step=sync * EVERY)
        queues = buffer.queues()
        ledger.write(sync, records, weights_sha256=f"{sync:064x}")
        made.publish(Version(sync, attempt.number))
        with tempfile.TemporaryDirectory() as folder:
            fill(folder, f"checkpoint {sync}")
            Path(folder, "queues.json").write_text(json.dumps(queues))
            checkpoints.save(sync, attempt.number, sync * EVERY, Path(folder))
        checkpoints.prune(1)
        Versions(run).prune(keep=1, every=100)


def arrive(run: Run, sync: int) -> None:
    """Append a shard before a sync, unless it exists, and an object that is not a shard, as other processes do."""
    run = Run.open(run.url)
    version = Versions(run).newest()
    asked = [PROMPTS[(2 * sync + n) % len(PROMPTS)] for n in range(2)]
    if not run.store.exists(layout.shard(0, sync)):
        rewards = {prompt_id: [0.0, 0.5, 1.0] for prompt_id in asked}
        shard = make_shard(rewards, round=sync, version_start=version, version_end=version)
        Trajectories(run).append(0, sync, shard)
        run.store.create(layout.shard(9, sync), b"no shard")


def drawn(run: Run) -> dict[int, list[str]]:
    """Return the drawn trajectories of each step, from the ledgers of the chain."""
    found: dict[int, list[str]] = {}
    for span in chain(run):
        for sync in range(max(span.first_sync, 1), 1 + min(SYNCS, SYNCS if span.last_sync is None else span.last_sync)):
            path = Path(run.url) / layout.draws(sync, span.attempt)
            for row in pq.read_table(path, columns=["step", "trajectory_id"]).to_pylist():
                found.setdefault(row["step"], []).append(row["trajectory_id"])
    return found


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = SyntheticRun(str(tmp_path_factory.mktemp("root")), "first").run
    write_prompts(run, "train", [make_prompt(prompt_id) for prompt_id in PROMPTS])
    return run


def again(run: Run, folder: Path) -> Run:
    shutil.rmtree(folder / run.name, ignore_errors=True)
    return Run.open(str(shutil.copytree(run.url, folder / run.name)))


@pytest.fixture(scope="module")
def unbroken(empty: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], dict[int, list[str]]]:
    """Return the numbers of the trainer's writes at which another kind of write begins, and its draws."""
    run = again(empty, tmp_path_factory.mktemp("unbroken"))
    store = Watched(run.store, 0, lambda name, key: None)
    live(replace(run, store=cast(Store, store)))
    assert_sound(run)
    kinds = [(name, key.rpartition("/")[0]) for name, key in store.writes]
    return [1 + n for n, kind in enumerate(kinds) if kind not in kinds[:n][-1:]], drawn(run)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: only processes fail here, not the machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def assert_sound(run: Run) -> None:
    assert check(run).problems == []
    refused = {event["data"]["key"] for event in read_events(run) if event["kind"] == "shard-refused"}
    assert refused == {layout.shard(9, sync) for sync in range(SYNCS + 1)}
    newest = Versions(run).newest()
    assert newest and newest.number == SYNCS
    assert [run.store.unfinished(prefix) for prefix in (layout.VERSIONS, layout.CHECKPOINTS)] == [[], []]


def test_a_trainer_that_is_killed_at_any_write_is_made_good_by_the_next(
    empty: Run, unbroken: tuple[list[int], dict[int, list[str]]], tmp_path: Path
):
    writes, expected = unbroken
    assert len(writes) > 20
    for at in writes:
        run = again(empty, tmp_path)
        store = Watched(run.store, at, lambda name, key: None)

        def kill(name: str, key: str, store: Watched = store, run: Run = run) -> None:
            store.dead = True
            if name in ("create", "upload"):
                begin_upload(run.store, key)

        store.happen = kill
        with pytest.raises(Killed):
            live(replace(run, store=cast(Store, store)))
        live(run)
        assert drawn(run) == expected, at
        assert_sound(run)


@pytest.mark.long
def test_a_trainer_that_is_overtaken_at_any_write_does_no_harm(
    empty: Run, unbroken: tuple[list[int], dict[int, list[str]]], tmp_path: Path
):
    writes, expected = unbroken
    for at in writes:
        run = again(empty, tmp_path)
        store = Watched(run.store, at, lambda name, key, run=run: live(run))
        with contextlib.suppress(Superseded):
            live(replace(run, store=cast(Store, store)))
        assert drawn(run) == expected, at
        assert_sound(run)
