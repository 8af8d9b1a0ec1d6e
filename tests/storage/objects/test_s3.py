"""Additional promises of a store on S3: it survives failures of the network, and shows no secrets."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.faulty_proxy import Fault, faulty
from benchmarks.harness.servers import Server
from storage.objects.open_store import open_store, probe
from storage.objects.s3.refusals import Refused
from storage.objects.s3.store import S3Store
from storage.objects.store import Entry, Store
from tba.errors import AlreadyExists, ConfigError, Missing, StorageError, UnsafeStore
from tests.conftest import s3_root
from tests.support.stores import S3_SERVERS, only_s3

BUSY: Fault = "busy"
CUT: Fault = "cut"


@only_s3
def test_a_listing_longer_than_a_page_is_whole(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.objects.s3.listings.OBJECTS_PER_PAGE", 7)
    for n in range(30):
        store.create(f"many/{n:02d}/x", b"%d" % n)
    assert [entry.key for entry in store.list("many/")] == [f"many/{n:02d}/x" for n in range(30)]
    assert [entry.key for entry in store.list(after="many/10")] == [f"many/{n:02d}/x" for n in range(10, 30)]
    assert store.folders("many/") == [f"{n:02d}" for n in range(30)]


def test_a_store_that_ignores_conditions_is_detected_and_named(rclone: Server, monkeypatch: pytest.MonkeyPatch):
    store = open_store(s3_root(rclone, monkeypatch))
    with pytest.raises(UnsafeStore, match="conditional writes") as caught:
        probe(store)
    assert store.url in str(caught.value)
    assert rclone.endpoint.removeprefix("http://") in str(caught.value)
    assert rclone.secret not in str(caught.value)


def test_a_url_that_carries_a_secret_is_refused_without_repeating_it():
    with pytest.raises(ConfigError) as caught:
        open_store("s3://key:hunter2@bucket/prefix")
    assert "hunter2" not in str(caught.value)


@only_s3
def test_a_remote_store_has_no_local_path(store: Store):
    assert store.local_path("a/b") is None


@pytest.fixture(params=S3_SERVERS)
def upstream(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("fault", ["busy", "unheard", "unanswered"])
def test_a_create_survives_a_fault(upstream: Server, monkeypatch: pytest.MonkeyPatch, fault):
    with faulty(upstream) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=20)
        proxy.plan = [fault, fault]
        store.create("x", b"mine")
        assert proxy.seen == 3
        assert store.read("x") == b"mine"
        with pytest.raises(AlreadyExists):
            store.create("x", b"mine")


def test_a_create_that_lost_its_answer_still_loses_to_other_content(upstream: Server, monkeypatch: pytest.MonkeyPatch):
    with faulty(upstream) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=20)
        store.create("x", b"theirs")
        proxy.plan = ["unanswered"]
        with pytest.raises(AlreadyExists):
            store.create("x", b"mine")
        assert store.read("x") == b"theirs"


def test_of_two_equal_creates_that_lose_answers_one_wins(upstream: Server, monkeypatch: pytest.MonkeyPatch):
    with faulty(upstream) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=20)
        store.create("warm", b"a connection that is used again")
        proxy.plan = ["unanswered"]
        store.create("x", b"same")
        proxy.plan = ["unanswered"]
        with pytest.raises(AlreadyExists):
            store.create("x", b"same")


def test_a_replace_that_lost_its_answer_has_succeeded(upstream: Server, monkeypatch: pytest.MonkeyPatch):
    with faulty(upstream) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=20)
        tag = store.replace("x", b"one", tag=None)
        proxy.plan = ["unanswered"]
        tag = store.replace("x", b"two", tag=tag)
        assert store.read_tagged("x") == (b"two", tag)
        store.replace("x", b"three", tag=tag)


def test_a_write_that_was_cut_short_is_invisible(upstream: Server, monkeypatch: pytest.MonkeyPatch):
    with faulty(upstream) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=0.5)
        proxy.plan = [CUT] * 10
        with pytest.raises(StorageError, match="x"):
            store.create("x", b"y" * 100_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", upstream.endpoint)
    assert open_store(store.url).list() == []


def test_reads_listings_and_uploads_survive_faults(upstream: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with faulty(upstream) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=20)
        (tmp_path / "file").write_bytes(os.urandom(17 << 20))
        proxy.plan = ["unanswered", "busy", "unheard"]
        store.upload(tmp_path / "file", "part")
        proxy.operations = ("get", "list")
        proxy.plan = ["busy", "unanswered"]
        store.download("part", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
        proxy.plan = ["unheard", "busy"]
        assert store.list() == [Entry("part", 17 << 20)]
        proxy.operations = ("begin", "complete")
        proxy.plan = ["unanswered", "unanswered"]
        store.upload(tmp_path / "file", "again")
        assert store.read("again") == (tmp_path / "file").read_bytes()


def test_a_server_that_stays_away_is_given_up_at_the_deadline_with_the_key_at_fault(
    moto: Server, monkeypatch: pytest.MonkeyPatch
):
    with faulty(moto) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=2.0)
        proxy.plan = [BUSY] * 1000
        with pytest.raises(StorageError, match="some/key"):
            store.create("some/key", b"x")
        assert proxy.seen > 1
    with pytest.raises(StorageError, match="some/key"):  # the server no longer listens
        store.read("some/key")


def test_an_upload_that_misses_its_deadline_frees_its_parts(
    upstream: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").write_bytes(bytes(33 << 20))
    with faulty(upstream) as (proxy, server):
        store = open_store(s3_root(server, monkeypatch), deadline=1.0)
        store.create("warm", b"a connection that is used again")
        proxy.plan = [BUSY] * 1000
        with pytest.raises(StorageError, match="part: "):
            store.upload(tmp_path / "file", "part")
        proxy.plan = []
        assert store.unfinished() == []
        assert [entry.key for entry in store.list()] == ["warm"]


@pytest.mark.ceph
def test_an_upload_that_was_swept_up_says_so(ceph: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(17 << 20))
    store = open_store(s3_root(ceph, monkeypatch), deadline=20)
    assert isinstance(store, S3Store)
    send = store.requests.send

    async def sweep_first(operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        if operation == "upload_part":
            await store.uploads.discard(key)
        return await send(operation, key, **parameters)

    monkeypatch.setattr(store.requests, "send", sweep_first)
    with pytest.raises(StorageError, match="part: its upload was aborted by another process"):
        store.upload(tmp_path / "file", "part")


@only_s3
def test_a_bucket_that_does_not_exist_is_named(root: str):
    with pytest.raises(StorageError, match="no-such-bucket") as caught:
        open_store("s3://no-such-bucket/x").create("a", b"")
    assert not isinstance(caught.value, Missing)


def test_keys_that_the_server_does_not_accept_are_an_error_at_once_and_never_shown(
    ceph: Server, monkeypatch: pytest.MonkeyPatch
):
    root = s3_root(ceph, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(StorageError, match=r"a/b: SignatureDoesNotMatch") as caught:
        open_store(root).create("a/b", b"")
    assert "hunter2" not in str(caught.value)


def test_a_server_that_takes_requests_and_never_answers_is_given_up_too(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = open_store(s3_root(server, monkeypatch), deadline=0.5)
        with pytest.raises(StorageError, match="some/key"):
            store.read("some/key")


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_server_that_cannot_list_uploads_stops_nobody(store: Store, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(store, S3Store)

    async def refuse(operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        raise Refused(403, "AccessDenied", "no")

    monkeypatch.setattr(store.requests, "send", refuse)
    assert store.unfinished("versions/") == []
    store.discard("versions/x")
