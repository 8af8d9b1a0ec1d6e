"""Manifest folders: all of their files at once, or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.objects import manifest_folders
from storage.objects.store import Store
from tba.errors import AlreadyExists, Damaged, Missing, StorageError
from tba.types import Version

PREFIX = "versions/000001-a0001/"


def a_folder(path: Path, **files: bytes) -> Path:
    for name, content in (files or {"config": b"{}", "weights": b"\x00\x01\x02"}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_was_published_is_fetched(store: Store, tmp_path: Path):
    source = a_folder(tmp_path / "source", **{"config.json": b"{}", "weights": b"w" * 70_000, "sub/deep": b""})
    manifest = manifest_folders.publish(store, PREFIX, source, {"step": 7})
    assert manifest["step"] == 7
    assert manifest_folders.read_manifest(store, PREFIX) == manifest
    assert contents(manifest_folders.fetch(store, PREFIX, tmp_path / "copy")) == contents(source)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(st.from_regex(r"[a-z]{1,8}(\.json)?", fullmatch=True), st.binary(), min_size=1))
def test_a_round_trip_is_exact(store: Store, tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]):
    here = tmp_path_factory.mktemp("folder")
    prefix = f"folders/{here.name}/"
    manifest_folders.publish(store, prefix, a_folder(here / "source", **files), {})
    assert contents(manifest_folders.fetch(store, prefix, here / "copy")) == files


def test_hidden_files_and_an_old_manifest_are_left_out(store: Store, tmp_path: Path):
    source = a_folder(tmp_path, **{"weights": b"w", ".gitattributes": b"x", ".cache/y": b"y", "MANIFEST.json": b"old"})
    manifest = manifest_folders.publish(store, PREFIX, source, {})
    assert [file["name"] for file in manifest["files"]] == ["weights"]


def test_parts_without_a_manifest_do_not_exist(store: Store, tmp_path: Path):
    store.upload(a_folder(tmp_path) / "weights", PREFIX + "weights")
    assert manifest_folders.read_manifest(store, PREFIX) is None
    assert manifest_folders.complete(store, "versions/") == []
    assert manifest_folders.survey(store, "versions/").unfinished == [Version(1, 1)]
    with pytest.raises(Missing, match=PREFIX):
        manifest_folders.fetch(store, PREFIX, tmp_path / "copy")
    with pytest.raises(Missing, match=PREFIX):
        manifest_folders.local_copy(store, PREFIX)


def test_publishing_goes_on_where_a_crash_left_it(store: Store, tmp_path: Path):
    source = a_folder(tmp_path / "source")
    (tmp_path / "other").write_bytes(b"half of something else")
    store.upload(tmp_path / "other", PREFIX + "weights")
    manifest_folders.publish(store, PREFIX, source, {})
    assert contents(manifest_folders.fetch(store, PREFIX, tmp_path / "copy")) == contents(source)


def test_publishing_the_same_again_is_done(store: Store, tmp_path: Path):
    source = a_folder(tmp_path / "source")
    first = manifest_folders.publish(store, PREFIX, source, {"step": 1})
    manifest_folders.publish(store, PREFIX, source, {"step": 1})
    assert manifest_folders.read_manifest(store, PREFIX) == first


def test_publishing_something_else_under_the_name_is_refused_and_changes_nothing(store: Store, tmp_path: Path):
    first = a_folder(tmp_path / "first")
    manifest_folders.publish(store, PREFIX, first, {})
    with pytest.raises(AlreadyExists, match=PREFIX):
        manifest_folders.publish(store, PREFIX, a_folder(tmp_path / "other", weights=b"others"), {})
    assert contents(manifest_folders.fetch(store, PREFIX, tmp_path / "copy")) == contents(first)


def test_an_empty_folder_is_not_published(store: Store, tmp_path: Path):
    with pytest.raises(StorageError, match="nothing to publish"):
        manifest_folders.publish(store, PREFIX, tmp_path, {})
    assert store.list() == []


@pytest.mark.parametrize("damage", [b"\x00\x01\x03", b"\x00\x01", b""])
def test_a_damaged_part_is_refused_by_name(store: Store, tmp_path: Path, damage: bytes):
    manifest_folders.publish(store, PREFIX, a_folder(tmp_path / "source"), {})
    (tmp_path / "damage").write_bytes(damage)
    store.upload(tmp_path / "damage", PREFIX + "weights")
    for load in (
        lambda: manifest_folders.fetch(store, PREFIX, tmp_path / "copy"),
        lambda: manifest_folders.local_copy(store, PREFIX),
    ):
        with pytest.raises(Damaged, match=PREFIX + "weights"):
            load()


def test_a_lost_part_is_refused_by_name(store: Store, tmp_path: Path):
    manifest_folders.publish(store, PREFIX, a_folder(tmp_path / "source"), {})
    store.delete(PREFIX + "weights")
    for load in (
        lambda: manifest_folders.fetch(store, PREFIX, tmp_path / "copy"),
        lambda: manifest_folders.local_copy(store, PREFIX),
    ):
        with pytest.raises(Damaged, match=PREFIX + "weights"):
            load()


def test_a_removed_folder_is_missing(store: Store, tmp_path: Path):
    manifest_folders.publish(store, PREFIX, a_folder(tmp_path / "source"), {})
    manifest_folders.remove(store, PREFIX)
    assert store.list() == []
    with pytest.raises(Missing):
        manifest_folders.local_copy(store, PREFIX)


@pytest.mark.parametrize("name", ["../../outside", "/etc/outside", "a/../../outside"])
def test_a_manifest_cannot_lead_outside_its_folder(store: Store, tmp_path: Path, name: str):
    file = {"name": name, "bytes": 1, "sha256": "0" * 64}
    manifest = {"files": [file], "sha256": "0" * 64, "created_at": "now"}
    store.create(PREFIX + "MANIFEST.json", json.dumps(manifest).encode())
    with pytest.raises(StorageError, match="outside"):
        manifest_folders.fetch(store, PREFIX, tmp_path / "copy")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": []}', b"\xff"])
def test_a_manifest_that_is_none_is_damaged(store: Store, content: bytes):
    store.create(PREFIX + "MANIFEST.json", content)
    with pytest.raises(Damaged, match=r"MANIFEST\.json"):
        manifest_folders.read_manifest(store, PREFIX)


def test_a_local_copy_is_had_again_from_where_it_was(store: Store, tmp_path: Path):
    source = a_folder(tmp_path / "source")
    manifest_folders.publish(store, PREFIX, source, {})
    first = manifest_folders.local_copy(store, PREFIX)
    assert manifest_folders.local_copy(store, PREFIX) == first
    assert {k: v for k, v in contents(first).items() if k != "MANIFEST.json"} == contents(source)


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_damaged_copy_in_the_cache_is_replaced(store: Store, tmp_path: Path):
    source = a_folder(tmp_path / "source")
    manifest_folders.publish(store, PREFIX, source, {})
    (manifest_folders.local_copy(store, PREFIX) / "weights").write_bytes(b"rot")
    assert contents(manifest_folders.local_copy(store, PREFIX)) == contents(source)


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_the_cache_keeps_the_few_used_last(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    copies = []
    for number in range(5):
        prefix = f"versions/{Version(number, 1)}/"
        manifest_folders.publish(store, prefix, a_folder(tmp_path / str(number), weights=b"%d" % number), {})
        copies.append(manifest_folders.local_copy(store, prefix, keep=3))
    assert [copy.exists() for copy in copies] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "manifest",
    [
        {"files": 3, "sha256": "0" * 64},
        {"files": ["weights"], "sha256": "0" * 64},
        {"files": [{"bytes": 1, "sha256": "0" * 64}], "sha256": "0" * 64},
        {"files": [{"name": "weights", "bytes": 1, "sha256": "0" * 64}], "sha256": "../../outside"},
    ],
)
@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_a_manifest_that_does_not_say_what_it_should_is_damaged(store: Store, manifest: dict[str, object]):
    store.create(PREFIX + "MANIFEST.json", json.dumps({**manifest, "created_at": "now"}).encode())
    with pytest.raises(Damaged, match=r"000001-a0001/MANIFEST\.json"):
        manifest_folders.local_copy(store, PREFIX)


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_a_folder_that_is_removed_while_it_is_read_is_missing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest_folders.publish(store, PREFIX, a_folder(tmp_path / "source"), {})
    verify = manifest_folders.verify_file

    def remove_first(*arguments: Any) -> None:
        manifest_folders.remove(store, PREFIX)
        verify(*arguments)

    monkeypatch.setattr(manifest_folders, "verify_file", remove_first)
    with pytest.raises(Missing, match=PREFIX):
        manifest_folders.local_copy(store, PREFIX)
