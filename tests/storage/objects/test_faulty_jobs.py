"""Whole jobs end in the same way with faults of network and server as without."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

import storage
from benchmarks.harness.faulty_proxy import Operation
from benchmarks.harness.servers import Server
from storage.log.ledger import ParquetLedger
from storage.log.prompts import write_prompts
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_leases
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.versions import Versions
from tba.types import Version
from tests.support.builders import make_prompt, make_shard
from tests.support.faults.faulty_store import FAULTS, Faulty
from tests.support.storage.synthetic import EVERY, PROMPTS, SyntheticRun, fill


def outcome(run: Run) -> dict[str, list[tuple]]:
    """Return the results of a job, except times."""
    asked = {
        "draws": "from draws_all select * exclude (advantage, residual, log_z, logp, ref_logp) order by all",
        "trajectories": "select trajectory_id, content_hash, sync from trajectories order by all",
        "versions": "select version, attempt, state, sha256 from versions order by all",
        "checkpoints": "select sync, attempt, step from checkpoints order by all",
        "evaluations": "select version, metric, value from evaluations order by all",
    }
    with storage.connect(run) as con:
        return {what: con.sql(query).fetchall() for what, query in asked.items()}


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return do_job(str(tmp_path_factory.mktemp("unhurt")))


def do_job(root: str) -> Run:
    """Store everything that two searchers and two attempts of a trainer store, and give up some of it."""
    made = SyntheticRun(root, "first")
    with HeldLease(made.run, "searcher-000", every=0.05) as searcher, HeldLease(made.run, "trainer", every=0.05):
        made.finish()
        searcher.tell("done")
        Checkpoints(made.run).prune(1)
        Versions(made.run).prune(keep=2, every=4)
    return made.run


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_job_that_meets_faults_ends_as_one_that_does_not(
    bad: Faulty, unhurt: Run, moto: Server, monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setenv("TBA_CACHE", str(bad.folder / "cache"))
    bad.proxy.operations = get_args(Operation)
    bad.proxy.at_random(seed, 0.15, FAULTS)
    url = do_job(bad.url).url
    assert bad.proxy.met.total() * 0.1 < bad.proxy.met.total() - bad.proxy.met["pass"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    run = Run.open(url)
    assert check(run).problems == []
    assert outcome(run) == outcome(unhurt)
    statuses = {lease.role: lease.status for lease in read_leases(run)}
    assert statuses == {"searcher-000": "stopped", "trainer": "stopped"}


ROUNDS, SYNCS = 6, 4


def search(run: Run, searcher: int) -> None:
    for round in range(ROUNDS):
        version = Versions(run).newest() or Version(0, 1)
        rewards = {prompt_id: [0.0, 0.5, 1.0] for prompt_id in PROMPTS[searcher::2]}
        shard = make_shard(rewards, searcher=searcher, round=round, version_start=version, version_end=version)
        Trajectories(run).append(searcher, round, shard)


def train(run: Run) -> None:
    """Train with two searchers at the same time, from the first version to the last sync, and give up everything
    early."""
    made, checkpoints, attempt = SyntheticRun.of(run), Checkpoints(run), claim_attempt(run).number
    buffer, ledger = made.buffer(attempt), ParquetLedger(run, attempt)
    made.publish(Version(0, attempt))
    with ThreadPoolExecutor(2) as pool:
        searching = [pool.submit(search, run, searcher) for searcher in range(2)]
        while not buffer.waiting():
            time.sleep(0.01)
        buffer.sync(0, step=0)
        for sync in range(1, SYNCS + 1):
            steps = range((sync - 1) * EVERY + 1, sync * EVERY + 1)
            records = [made.step(step, sync, buffer.draw(step), attempt) for step in steps]
            for record in records:
                fetched = buffer.fetch(record.draws)
                assert fetched.prompt_ids == [draw.prompt_id for draw in record.draws]
                found = fetched.response_tokens.elements_N.reshape(-1, 4)  # responses begin with searcher and round
                drawn = [draw.trajectory_id.split("/") for draw in record.draws]
                assert found[:, :2].tolist() == [[int(searcher), int(round)] for searcher, round, _ in drawn]
            if sync == SYNCS:
                _ = [searcher.result() for searcher in searching]
                while buffer.waiting() and len(buffer.shards) + len(buffer.arrivals.found) < 2 * ROUNDS:
                    Events(run, "searcher-000", 1).write("waiting", "a write, so that the listings get on")
            buffer.sync(sync, step=sync * EVERY)
            ledger.write(sync, records, weights_sha256=f"{sync:064x}")
            made.publish(Version(sync, attempt))
            with tempfile.TemporaryDirectory() as folder:
                fill(folder, f"checkpoint {sync}")
                checkpoints.save(sync, attempt, sync * EVERY, Path(folder))
            checkpoints.prune(1)
            Versions(run).prune(keep=2, every=SYNCS)


@pytest.mark.long
def test_a_job_whose_listings_are_behind_loses_and_doubles_nothing(
    bad: Faulty, moto: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TBA_CACHE", str(bad.folder / "cache"))
    made = SyntheticRun(bad.url, "first")
    write_prompts(made.run, "train", [make_prompt(prompt_id) for prompt_id in PROMPTS])
    bad.proxy.operations, bad.proxy.lag = get_args(Operation), 6
    bad.proxy.at_random(0, 0.5, ["stale", "stale", "stale", "unanswered", "busy"])
    train(made.run)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    run = Run.open(made.run.url)
    assert check(run).problems == []
    assert Checkpoints(run).newest() == Versions(run).newest() == Version(SYNCS, 1)
    responses = 2 * ROUNDS * 3 * len(PROMPTS[::2])
    with storage.connect(run) as con:
        assert con.sql("select count(*), count(distinct trajectory_id), count(sync) from trajectories").fetchall() == [
            (responses, responses, responses)
        ]
        drawn = con.sql("select step, slot, trajectory_id, branch, weight from draws order by step, slot, position")
        ledger = drawn.fetchall()
    again = SyntheticRun.of(run).buffer(1)
    draws = []
    for sync in range(SYNCS):
        again.sync(sync, step=sync * EVERY)
        draws += [draw for step in (1, 2) for draw in again.draw(sync * EVERY + step)]
    assert ledger == [(it.step, it.slot, it.trajectory_id, it.branch, it.weight) for it in draws]
    Checkpoints(run).prune(1)  # this listing is not stale
    assert Checkpoints(run).complete() == [Version(SYNCS, 1)]
    Versions(run).prune(keep=2, every=SYNCS)
    assert Versions(run).complete() == [Version(n, 1) for n in (0, SYNCS - 1, SYNCS)]
