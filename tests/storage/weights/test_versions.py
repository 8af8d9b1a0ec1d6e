"""Published versions: which is the newest, and where they are loaded from."""

import errno
import os
from pathlib import Path

import pytest

from storage import layout
from storage.local_files.verified_files import settle
from storage.maintenance.check import check
from storage.objects import manifest_folders
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.errors import Damaged, Missing
from tba.types import Version
from tests.support.storage.published_versions import count_downloads, publish, weights

local = pytest.mark.parametrize("root", ["local"], indirect=True)
remote = pytest.mark.parametrize("root", ["moto"], indirect=True)


def test_a_published_version_is_loaded_as_it_was(run: Run, tmp_path: Path):
    versions = Versions(run)
    assert versions.newest() is None
    assert versions.reference() is None
    publish(run, tmp_path, (0, 1), (3, 1))
    assert versions.newest() == Version(3, 1)
    assert versions.step(Version(3, 1)) == 6
    assert (versions.load(Version(3, 1)) / "model.safetensors").read_bytes() == b"(3, 1)"


@local
def test_a_higher_attempt_is_newer_whatever_its_number(run: Run, tmp_path: Path):
    publish(run, tmp_path, (0, 1), (9, 1), (4, 2), (10, 1))
    assert Versions(run).newest() == Version(4, 2)


@local
def test_the_reference_is_version_0_of_the_earliest_attempt(run: Run, tmp_path: Path):
    publish(run, tmp_path, (0, 2), (0, 1), (5, 2))
    assert Versions(run).reference() == Version(0, 1)


def test_a_version_that_is_not_complete_is_neither_newest_nor_loaded(run: Run, tmp_path: Path):
    publish(run, tmp_path, (1, 1))
    half = layout.version(Version(2, 1))
    run.store.upload(weights(tmp_path, "half") / "model.safetensors", f"{half}model.safetensors")
    assert Versions(run).newest() == Version(1, 1)
    for ask in (Versions(run).load, Versions(run).step):
        with pytest.raises(Missing, match="000002-a0001"):
            ask(Version(2, 1))


def test_a_damaged_version_is_refused_by_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(run, tmp_path, (1, 1))
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of another machine"))
    key = f"{layout.version(Version(1, 1))}model.safetensors"
    run.store.upload(weights(tmp_path, "x") / "model.safetensors", key)
    with pytest.raises(Damaged, match=key):
        Versions(run).load(Version(1, 1))


@remote
def test_who_is_on_the_machine_of_the_trainer_fetches_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    publish(run, tmp_path, *((number, 1) for number in range(6)))
    fetched = count_downloads(run, monkeypatch)
    copy = Versions(run).load(Version(5, 1)) / "model.safetensors"
    assert (copy.read_bytes(), fetched) == (b"(5, 1)", [])
    assert copy.samefile(tmp_path / "weights-(5, 1)" / "model.safetensors")  # no byte was copied
    assert len(list((tmp_path / "cache" / "versions").glob("[!.]*"))) == 4  # the cache is still bounded
    copy.write_bytes(b"rot")
    assert Versions(run).load(Version(5, 1)).joinpath("model.safetensors").read_bytes() == b"(5, 1)"
    assert fetched == [f"{layout.version(Version(5, 1))}model.safetensors"]


@remote
def test_where_the_cache_is_on_another_disk_files_are_copied_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def other_disk(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(manifest_folders.os, "link", other_disk)
    publish(run, tmp_path, (1, 1))
    fetched = count_downloads(run, monkeypatch)
    assert (Versions(run).load(Version(1, 1)) / "model.safetensors").read_bytes() == b"(1, 1)"
    assert fetched == []


@remote
def test_a_version_is_published_though_the_cache_cannot_take_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    publish(run, tmp_path, (1, 1))
    assert "versions/000001-a0001/ cannot be kept in the cache of this machine" in caplog.text
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "another"))
    assert (Versions(run).load(Version(1, 1)) / "model.safetensors").read_bytes() == b"(1, 1)"


@local
def test_a_version_on_this_machine_is_read_where_it_lies(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    publish(run, tmp_path, (1, 1))
    assert Versions(run).load(Version(1, 1)) == Path(run.url) / layout.version(Version(1, 1))
    assert not (tmp_path / "cache").exists()


@local
def test_what_is_published_on_the_same_disk_is_linked(run: Run, tmp_path: Path):
    publish(run, tmp_path, (1, 1))
    stored = Versions(run).load(Version(1, 1)) / "model.safetensors"
    assert stored.samefile(tmp_path / "weights-(1, 1)" / "model.safetensors")


@pytest.fixture
def verified(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of version 1, which this machine has verified."""
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    publish(run, tmp_path, (1, 1))
    file = Path(run.url) / layout.version(Version(1, 1)) / "model.safetensors"
    settle(file)
    Versions(run).load(Version(1, 1))
    return file


def rot(file: Path) -> None:
    """Change a byte as a failing disk does: without a trace in the times of the file."""
    about = file.stat()
    file.write_bytes(b"X" + file.read_bytes()[1:])
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


@local
def test_rot_of_a_file_that_was_verified_here_is_found_by_a_check_and_on_another_machine(
    run: Run, tmp_path: Path, verified: Path, monkeypatch: pytest.MonkeyPatch
):
    rot(verified)
    Versions(run).load(Version(1, 1))  # this machine trusts its verification
    assert [it.key for it in check(run).problems if "model.safetensors" in it.problem] == [
        layout.version(Version(1, 1))
    ]
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of another machine"))
    with pytest.raises(Damaged, match=r"model\.safetensors does not have the content"):
        Versions(run).load(Version(1, 1))


@local
def test_a_change_of_a_file_that_was_verified_here_is_found(run: Run, verified: Path):
    verified.write_bytes(b"X" + verified.read_bytes()[1:])
    with pytest.raises(Damaged, match=r"model\.safetensors does not have the content"):
        Versions(run).load(Version(1, 1))
