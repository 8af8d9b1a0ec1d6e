"""Operations that are given up after lasting faults: each error names the key, and nothing is left half-written."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.harness.faulty_proxy import Fault, Operation
from storage.objects.store import Store
from tba.errors import StorageError
from tests.support.faults.faulty_store import PART, Faulty
from tests.support.sampled_parameters import sampled

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
