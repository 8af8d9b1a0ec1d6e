"""Operations while network and server fail: an operation that meets a fault is done again, and of two writers that want
the same, one wins."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from _pytest.mark.structures import ParameterSet

from benchmarks.harness.faulty_proxy import Fault, Operation
from storage.objects.s3.store import S3Store
from storage.objects.store import Entry
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_lease
from tba.errors import AlreadyExists, Conflict, Missing, Superseded
from tests.support.faults.faulty_store import FAULTS, PART, Faulty
from tests.support.faults.uploads import begin_upload
from tests.support.storage.synthetic import SyntheticRun

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
