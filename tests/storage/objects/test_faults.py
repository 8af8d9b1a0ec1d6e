"""Operations and whole jobs while network and server fail: the result is right in the end, or there is a clear error
and nothing half-written."""

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from _pytest.mark.structures import ParameterSet

import storage
from benchmarks.harness.faulty_proxy import Fault, Operation, Proxy, faulty
from benchmarks.harness.servers import Server
from storage import layout
from storage.log.ledger import ParquetLedger
from storage.log.prompts import write_prompts
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.objects import manifest_folders
from storage.objects.open_store import open_store
from storage.objects.s3.store import S3Store
from storage.objects.store import Entry, Store
from storage.runs.attempts import newest_attempt
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_lease, read_leases
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.versions import Versions
from tba.errors import AlreadyExists, Conflict, Missing, StorageError, Superseded
from tba.types import Version
from tests.conftest import s3_root
from tests.support.builders import make_prompt, make_shard
from tests.support.faults.uploads import begin_upload
from tests.support.sampled_parameters import sampled
from tests.support.storage.synthetic import EVERY, PROMPTS, SyntheticRun, fill

FAULTS: tuple[Fault, ...] = tuple(fault for fault in get_args(Fault) if fault not in ("pass", "stale"))
PART = 5 << 20  # the smallest part that a server accepts


class Faulty(NamedTuple):
    """A store that is reached through a proxy, and the same store behind the proxy."""

    store: Store
    proxy: Proxy
    behind: Store
    url: str
    folder: Path  # on this machine

    def impatient(self) -> Store:
        return open_store(self.url, deadline=0.8)


@pytest.fixture
def bad(moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faulty]:
    monkeypatch.setattr("storage.objects.s3.file_transfers.PART", PART)
    monkeypatch.setattr("storage.objects.s3.connection.SILENCE", 0.25)
    monkeypatch.setattr("storage.objects.s3.requests.FIRST_PAUSE", 0.01)
    url = s3_root(moto, monkeypatch)
    behind = open_store(url)
    with faulty(moto) as (proxy, server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield Faulty(open_store(url, deadline=20), proxy, behind, url, tmp_path)


# --- one operation ----------------------------------------------------------------------------------------------------
# Each operation works on its own key and checks the result.


def create(bad: Faulty, key: str) -> None:
    bad.store.create(key, b"content" * 100)
    assert bad.behind.read(key) == b"content" * 100


def read(bad: Faulty, key: str) -> None:
    bad.behind.create(key, b"content" * 100)
    assert bad.store.read(key) == b"content" * 100


def read_many(bad: Faulty, key: str) -> None:
    for n in range(3):
        bad.behind.create(f"{key}/{n}", b"%d" % n * 100)
    assert list(bad.store.read_many([f"{key}/{n}" for n in range(3)])) == [b"%d" % n * 100 for n in range(3)]


def read_tagged(bad: Faulty, key: str) -> None:
    tag = bad.behind.replace(key, b"content", tag=None)
    assert bad.store.read_tagged(key) == (b"content", tag)


def exists(bad: Faulty, key: str) -> None:
    bad.behind.create(key, b"x")
    assert bad.store.exists(key)


def list_keys(bad: Faulty, key: str) -> None:
    bad.behind.create(f"{key}/a", b"x")
    assert bad.store.list(f"{key}/") == [Entry(f"{key}/a", 1)]


def list_folders(bad: Faulty, key: str) -> None:
    bad.behind.create(f"{key}/a/b", b"x")
    assert bad.store.folders(f"{key}/") == ["a"]


def replace(bad: Faulty, key: str) -> None:
    tag = bad.store.replace(key, b"first", tag=bad.behind.replace(key, b"before", tag=None))
    assert bad.behind.read_tagged(key) == (b"first", tag)
    bad.behind.replace(key, b"second", tag=tag)


def replace_nothing(bad: Faulty, key: str) -> None:
    tag = bad.store.replace(key, b"first", tag=None)
    assert bad.behind.read_tagged(key) == (b"first", tag)


def upload(bad: Faulty, key: str, size: int = 1000) -> None:
    (bad.folder / "source").write_bytes(content := random.Random(0).randbytes(size))
    bad.store.upload(bad.folder / "source", key)
    assert bad.behind.read(key) == content


def download(bad: Faulty, key: str) -> None:
    bad.behind.create(key, content := random.Random(0).randbytes(1000))
    bad.store.download(key, bad.folder / "copy")
    assert (bad.folder / "copy").read_bytes() == content


def delete(bad: Faulty, key: str) -> None:
    bad.behind.create(key, b"x")
    bad.store.delete(key)
    assert not bad.behind.exists(key)


def unfinished(bad: Faulty, key: str) -> None:
    begin_upload(bad.behind, key)
    assert bad.store.unfinished(key) == [key]


def discard(bad: Faulty, key: str) -> None:
    begin_upload(bad.behind, key)
    bad.store.discard(key)
    assert bad.behind.unfinished(key) == []


def read_missing(bad: Faulty, key: str) -> None:
    with pytest.raises(Missing, match=key):
        bad.store.read(key)


def read_tagged_missing(bad: Faulty, key: str) -> None:
    assert bad.store.read_tagged(key) is None


def create_again(bad: Faulty, key: str) -> None:
    bad.behind.create(key, b"content")
    with pytest.raises(AlreadyExists, match=key):
        bad.store.create(key, b"content")


def replace_too_late(bad: Faulty, key: str) -> None:
    tag = bad.behind.replace(key, b"before", tag=None)
    bad.behind.replace(key, b"by another", tag=tag)
    with pytest.raises(Conflict, match=key):
        bad.store.replace(key, b"mine", tag=tag)
    assert bad.behind.read(key) == b"by another"


upload_parts = partial(upload, size=PART + 1000)

OPERATIONS: list[tuple[Callable[[Faulty, str], None], Operation]] = [
    (create, "put"),
    (read, "get"),
    (read_many, "get"),
    (read_tagged, "get"),
    (exists, "head"),
    (list_keys, "list"),
    (list_folders, "list"),
    (replace, "put"),
    (replace_nothing, "put"),
    (upload, "put"),
    (upload_parts, "begin"),
    (upload_parts, "part"),
    (upload_parts, "complete"),
    (download, "head"),
    (download, "get"),
    (delete, "delete"),
    (unfinished, "uploads"),
    (discard, "uploads"),
    (discard, "abort"),
    (read_missing, "get"),
    (read_tagged_missing, "get"),
    (create_again, "put"),
    (create_again, "head"),
    (replace_too_late, "put"),
]
NAMES = [f"{getattr(act, '__name__', 'upload_parts')}-{asks}" for act, asks in OPERATIONS]

FLAWLESS: set[tuple[Operation, Fault]] = {("uploads", "empty")}
"""Faults that look like the regular answer of some servers."""


SAMPLED = 4


def operations_and_faults() -> Iterator[ParameterSet]:
    """Yield each operation with a few faults in turn, and with every fault for `make test-long`."""
    for number, (name, (act, asks)) in enumerate(zip(NAMES, OPERATIONS, strict=True)):
        faults = [fault for fault in FAULTS if (asks, fault) not in FLAWLESS]
        yield pytest.param(act, asks, faults[number % SAMPLED :: SAMPLED], id=name)
        yield pytest.param(act, asks, faults, id=f"{name}-every fault", marks=pytest.mark.long)


@pytest.mark.parametrize(("act", "asks", "faults"), [*operations_and_faults()])
def test_an_operation_that_meets_a_fault_is_done_again_and_right(
    bad: Faulty, act: Callable[[Faulty, str], None], asks: Operation, faults: Sequence[Fault]
):
    bad.proxy.operations = (asks,)
    for fault in faults:
        bad.proxy.plan = [fault]
        act(bad, f"key/{fault}")
        assert bad.proxy.plan == []
        assert bad.proxy.met[fault] == 1, fault


# --- an operation that is given up ------------------------------------------------------------------------------------

WRITES: list[tuple[Callable[[Store, str, Path], object], Sequence[Operation]]] = [
    (lambda store, key, source: store.create(key, source.read_bytes()), ["put"]),
    (lambda store, key, source: store.replace(key, source.read_bytes(), tag=None), ["put"]),
    (lambda store, key, source: store.upload(source, key), ["put"]),
    (lambda store, key, source: store.upload(source, key), ["begin", "part", "complete"]),
]


@pytest.mark.parametrize("fault", sampled(["cut", "unanswered", "late"], kept=["late"]))
def test_a_write_that_is_given_up_names_the_key_and_leaves_all_or_nothing(bad: Faulty, fault: Fault):
    store = bad.impatient()
    for n, (write, requests) in enumerate(WRITES):
        size = PART + 1000 if "part" in requests else 1000
        (bad.folder / "source").write_bytes(os.urandom(size))
        for asks in requests:
            key = f"some/{n}-{asks}"
            bad.proxy.operations, bad.proxy.plan = [asks], [fault] * 1000
            with pytest.raises(StorageError, match=rf"{key}: .* \(tried for 0.8 s\)"):
                write(store, key, bad.folder / "source")
            bad.proxy.plan = []
            if fault != "cut" and asks in ("put", "complete"):  # the write has been done, or soon will be
                while not bad.behind.exists(key):
                    time.sleep(0.01)
                assert bad.behind.read(key) == (bad.folder / "source").read_bytes()
            else:
                assert bad.behind.list(key) == []
    begun_unheard = [f"some/{n}-begin" for n, (_, asks) in enumerate(WRITES) if "begin" in asks]
    assert set(bad.behind.unfinished("some/")) <= set(begun_unheard)


READS: list[tuple[Callable[[Store, str, Path], object], Operation]] = [
    (lambda store, key, _: store.read(key), "get"),
    (lambda store, key, _: store.read_many([key]), "get"),
    (lambda store, key, _: store.read_tagged(key), "get"),
    (lambda store, key, _: store.exists(key), "head"),
    (lambda store, key, _: store.list(key), "list"),
    (lambda store, key, _: store.folders(f"{key}/"), "list"),
    (lambda store, key, copy: store.download(key, copy), "head"),
    (lambda store, key, copy: store.download(key, copy), "get"),
    (lambda store, key, _: store.delete(key), "delete"),
]


@pytest.mark.parametrize("fault", ["busy", "torn"])
def test_whatever_else_is_given_up_names_the_key_too(bad: Faulty, fault: Fault):
    store = bad.impatient()
    bad.behind.create("some/key", b"content")
    for look, asks in READS:
        if fault == "torn" and asks != "get":
            continue
        bad.proxy.operations, bad.proxy.plan = [asks], [fault] * 1000
        with pytest.raises(StorageError, match=r"some/key/?: .* \(tried for 0.8 s\)"):
            look(store, "some/key", bad.folder / "copy")
        assert not (bad.folder / "copy").exists()
        if asks != "delete":
            assert bad.behind.read("some/key") == b"content"


def test_a_body_that_never_comes_whole_is_an_error_and_no_content(bad: Faulty):
    store = bad.impatient()
    bad.behind.create("some/key", b"content")
    bad.proxy.operations, bad.proxy.plan = ["get"], ["short"] * 1000
    with pytest.raises(StorageError, match="some/key: only 3 of 7 bytes were received"):
        store.read("some/key")
    bad.proxy.operations, bad.proxy.plan = ["list"], ["empty"] * 1000
    with pytest.raises(StorageError, match="some/: the answer came without its IsTruncated"):
        store.list("some/")


def test_what_a_server_said_first_is_not_hidden_by_its_silence_at_the_end(bad: Faulty):
    bad.proxy.operations, bad.proxy.plan = ["get"], ["busy"]
    bad.proxy.at_random(0, 1.0, ["silent"])
    with pytest.raises(StorageError, match=r"some/key: .*(SlowDown: busy|timeout)"):
        bad.impatient().read("some/key")


def test_a_server_that_is_away_for_a_while_is_waited_for(bad: Faulty, caplog: pytest.LogCaptureFixture):
    bad.store.create("before", b"x")
    bad.proxy.leave()
    with pytest.raises(StorageError, match=r"before: .*[Cc]onnect"):
        bad.impatient().read("before")
    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(bad.store.create, "during", b"y")
        while "during: " not in caplog.text and not created.done():
            time.sleep(0.01)
        assert not created.done()
        bad.proxy.come_back()
        created.result()
    assert bad.store.read("during") == b"y"


# --- two that want the same -------------------------------------------------------------------------------------------


def compete(bad: Faulty, write: Callable[[str, bytes], object]) -> None:
    """Let two writers write each key at once. One of them wins, and both know which."""
    bad.proxy.operations = ("put", "head", "get")
    together = threading.Barrier(2)

    def contend(racer: int, key: str) -> bool:
        together.wait()
        try:
            write(key, b"%d" % racer)
        except (AlreadyExists, Conflict):
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        for n in range(15):
            results = list(pool.map(partial(contend, key=f"race/{n}"), range(2)))
            assert sorted(results) == [False, True]
            assert bad.behind.read(f"race/{n}") == b"%d" % results.index(True)
    assert all(bad.proxy.met[fault] for fault in UNCERTAIN)


UNCERTAIN: Sequence[Fault] = ("unanswered", "failed", "torn", "busy", "unheard", "cut")


@pytest.mark.parametrize("seed", range(2))
def test_of_two_creators_one_wins_and_both_know_whatever_is_lost(bad: Faulty, seed: int):
    bad.proxy.at_random(seed, 0.5, UNCERTAIN)
    compete(bad, bad.store.create)


@pytest.mark.parametrize("seed", range(2))
def test_of_two_replacers_one_wins_and_both_know_whatever_is_lost(bad: Faulty, seed: int):
    tags = {f"race/{n}": bad.behind.replace(f"race/{n}", b"before", tag=None) for n in range(15)}
    bad.proxy.at_random(seed, 0.5, UNCERTAIN)
    compete(bad, lambda key, data: bad.store.replace(key, data, tag=tags[key]))


def test_a_lease_whose_renewal_was_given_up_and_arrived_all_the_same_is_still_held(
    bad: Faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = SyntheticRun(bad.url, "first").run
    with HeldLease(run, "trainer", every=0.02) as held:
        bad.proxy.at_random(0, 1.0, ["unanswered"])
        with monkeypatch.context() as impatient:
            assert isinstance(run.store, S3Store)
            impatient.setattr(run.store.requests, "deadline", 0.4)
            while "(tried for 0.4 s)" not in caplog.text:
                time.sleep(0.01)
        arrived = read_lease(run, "trainer")
        bad.proxy.recover()
        while (now := read_lease(run, "trainer")) and arrived and now.counter <= arrived.counter:
            held.check()
        with HeldLease(run, "trainer", every=60), pytest.raises(Superseded, match="another trainer"):
            while True:
                held.check()


# --- listings as they were a while ago --------------------------------------------------------------------------------


@pytest.fixture
def stale(bad: Faulty) -> Faulty:
    """Let listings hide objects that have just been created."""
    bad.proxy.operations = ("list",)
    bad.proxy.at_random(0, 1.0, ["stale"])
    return bad


def publish(store: Store, bad: Faulty, version: Version) -> None:
    (bad.folder / "weights").mkdir(exist_ok=True)
    fill(str(bad.folder / "weights"), str(version))
    manifest_folders.publish(store, layout.version(version), bad.folder / "weights", {})


def test_a_listing_may_be_older_than_what_was_created(stale: Faulty):
    stale.proxy.lag = 1
    stale.store.create("a/x", b"")
    stale.store.create("b/y", b"")
    assert [entry.key for entry in stale.store.list()] == ["a/x"]
    assert stale.store.folders() == ["a"]


def test_a_version_that_a_listing_does_not_show_yet_is_published_all_the_same(stale: Faulty):
    publish(stale.store, stale, Version(1, 1))
    assert manifest_folders.complete(stale.store, layout.VERSIONS) == []
    assert manifest_folders.complete(stale.behind, layout.VERSIONS) == [Version(1, 1)]


def test_a_version_whose_manifest_a_listing_does_not_show_yet_is_not_swept_up(stale: Faulty):
    publish(stale.store, stale, Version(1, 2))
    publish(stale.store, stale, Version(2, 1))
    stale.proxy.lag = 1
    found = manifest_folders.survey(stale.store, layout.VERSIONS)
    assert found.unfinished == manifest_folders.left_behind(stale.store, layout.VERSIONS, found) == [Version(2, 1)]
    assert manifest_folders.sweep(stale.store, layout.version(Version(2, 1)))
    assert manifest_folders.fetch(stale.behind, layout.version(Version(2, 1)), stale.folder / "copy")


def test_an_attempt_that_a_listing_does_not_show_yet_is_the_newest_all_the_same(stale: Faulty):
    run = SyntheticRun(stale.url, "first").run
    stale.proxy.lag = 1000
    assert [claim_attempt(run).number for _ in range(3)] == [1, 2, 3]
    assert newest_attempt(run) == 3


def test_a_checkpoint_of_an_attempt_that_a_listing_does_not_show_yet_is_not_given_up(bad: Faulty):
    run = SyntheticRun(bad.url, "first").run
    (bad.folder / "weights").mkdir()
    fill(str(bad.folder / "weights"), "a checkpoint")
    bad.proxy.operations, bad.proxy.lag = ("list",), 1000
    assert claim_attempt(run).number == 1
    Checkpoints(run).save(0, 1, 0, bad.folder / "weights")
    assert claim_attempt(run).number == 2
    for key in (layout.draws(1, 2), layout.steps(1, 2)):
        run.store.create(key, b"what it needs")
    Checkpoints(run).save(1, 2, EVERY, bad.folder / "weights")
    bad.proxy.plan = ["stale", *["pass"] * 20]  # the listing of attempts
    Checkpoints(run).prune(1)
    assert Checkpoints(run).complete() == [Version(1, 2)]


def test_a_round_that_a_listing_does_not_show_yet_is_not_taken_again(stale: Faulty):
    log = Trajectories(SyntheticRun(stale.url, "first").run)
    for round in range(3):
        assert log.next_seq(0) == round
        log.append(0, round, make_shard({"train/0": [1.0]}, round=round))


# --- a whole job ------------------------------------------------------------------------------------------------------


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
