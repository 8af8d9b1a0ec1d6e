"""Versions that are stored as differences from a base."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import layout
from storage.objects import deltas, manifest_folders
from storage.runs.retention import given_up
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.errors import Damaged, Missing, Superseded
from tba.types import Base, Version
from tests.support.faults.rewriting import rewrite
from tests.support.storage.published_versions import count_downloads, publish

local = pytest.mark.parametrize("root", ["local"], indirect=True)
remote = pytest.mark.parametrize("root", ["moto"], indirect=True)

BASE, NEXT, LAST = Version(4, 1), Version(5, 1), Version(6, 1)


def a_policy(folder: Path, version: Version, *, changed: int = 50) -> Path:
    """Write a policy. Each version changes other bytes of the same weights."""
    chance = random.Random(0)
    weights = bytearray(chance.randbytes(40_000))
    for place in random.Random(str(version)).sample(range(len(weights)), changed):
        weights[place] ^= 1
    (folder / str(version)).mkdir(parents=True)
    (folder / str(version) / "model.safetensors").write_bytes(weights)
    (folder / str(version) / "config.json").write_text("{}")
    return folder / str(version)


def publish_from(
    run: Run, version: Version, folder: Path, base: Version | None = BASE, /, **of_it: int
) -> tuple[bool, Path]:
    """Publish a version. Return True if it is stored whole, and the folder with its files."""
    policy = a_policy(folder, version, **of_it)
    whole = Versions(run).publish(
        version,
        step=2 * version.number,
        folder=policy,
        weights_sha256="",
        base=Base(base, folder / str(base)) if base else None,
    )
    return whole, policy


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != layout.MANIFEST}


@pytest.fixture
def three(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Publish a base and two versions as differences from it. Return their folders, and continue as another machine."""
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of the trainer"))
    published = [publish_from(run, BASE, tmp_path, None), *(publish_from(run, it, tmp_path) for it in (NEXT, LAST))]
    assert [whole for whole, _ in published] == [True, False, False]
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of another machine"))
    return [folder for _, folder in published]


def test_a_difference_takes_few_bytes_and_is_loaded_as_the_version_it_is_of(
    run: Run, three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each machine fetches the base once, except the trainer's, which has it."""
    here = run.store.local_path(layout.RUN) is not None
    fetched = count_downloads(run, monkeypatch)
    for version, policy in zip((NEXT, LAST, NEXT), (*three[1:], three[1]), strict=True):
        sizes = [entry.size for entry in run.store.list(layout.version(version)) if layout.MANIFEST not in entry.key]
        assert sum(sizes) < 2_000
        assert files(Versions(run).load(version)) == files(policy)
    names = [key.removeprefix(layout.VERSIONS) for key in fetched]
    assert names.count(f"{BASE}/model.safetensors") == (0 if here else 1)
    assert [names.count(f"{version}/model.safetensors.xor.zst") for version in (NEXT, LAST)] == [1, 1]
    fetched.clear()
    manifest_folders.remove(run.store, layout.version(BASE))
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of the trainer"))
    assert (files(Versions(run).load(LAST)), fetched) == (files(three[2]), [])


@local
@pytest.mark.parametrize("changed", [0, 40_000])
def test_a_version_is_stored_whole_where_its_difference_is_no_less_than_half(run: Run, tmp_path: Path, changed: int):
    publish_from(run, BASE, tmp_path, None)
    (tmp_path / str(BASE) / "model.safetensors").write_bytes(random.Random(1).randbytes(40_000 if changed else 39_999))
    whole, policy = publish_from(run, NEXT, tmp_path)
    assert whole and files(Versions(run).load(NEXT)) == files(policy)
    assert Versions(run).base(NEXT) is None
    assert {entry.key.rpartition("/")[2] for entry in run.store.list(layout.version(NEXT))} == {
        "config.json", "model.safetensors", layout.MANIFEST
    }  # fmt: skip


@local
def test_publishing_a_difference_again_is_done(run: Run, three: list[Path]):
    again = {"step": 10, "weights_sha256": ""}
    assert Versions(run).publish(NEXT, folder=three[1], **again) is False
    assert Versions(run).publish(BASE, folder=three[0], **again) is True


def rot(run: Run, version: Version, name: str, tmp_path: Path) -> None:
    (tmp_path / "rot").write_bytes(b"rot")
    run.store.upload(tmp_path / "rot", f"{layout.version(version)}{name}")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda run, path: rot(run, NEXT, "model.safetensors.xor.zst", path), "model.safetensors.xor.zst has 3 bytes"),
        (lambda run, path: rot(run, BASE, "model.safetensors", path), f"{BASE}/model.safetensors has 3 bytes"),
        (lambda run, path: run.store.delete(f"{layout.version(BASE)}model.safetensors"), f"{BASE}/.* is gone"),
        (lambda run, path: manifest_folders.remove(run.store, layout.version(BASE)), f"{BASE}/ does not exist"),
    ],
)
def test_a_version_whose_difference_or_base_is_damaged_is_refused_by_the_names_of_both(
    run: Run, three: list[Path], tmp_path: Path, damage: Callable[[Run, Path], None], named: str
):
    damage(run, tmp_path)
    with pytest.raises(Damaged, match=f"{NEXT}.*{named}"):
        Versions(run).load(NEXT)


@local
def test_a_difference_of_something_else_is_refused(run: Run, three: list[Path]):
    said, prefixes = [], [layout.version(version) for version in (NEXT, LAST)]
    for prefix in prefixes:
        path = run.store.local_path(prefix + layout.MANIFEST)
        assert path
        said.append((path, json.loads(path.read_bytes())))
    rewrite(said[1][0], difference=said[0][1]["difference"])
    for name in ("config.json", "model.safetensors"):
        other, mine = (run.store.local_path(f"{prefix}{name}.xor.zst") for prefix in prefixes)
        assert other and mine
        mine.write_bytes(other.read_bytes())
    with pytest.raises(Damaged, match=f"{LAST}/model.safetensors does not have the content"):
        Versions(run).load(LAST)


@remote
def test_a_version_and_its_base_may_have_names_in_the_cache_that_share_a_guard(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def name(policy: Path) -> str:
        return manifest_folders.digest_of(manifest_folders.describe_files(policy))

    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of the trainer"))
    _, base = publish_from(run, BASE, tmp_path, None)
    policy, number = a_policy(tmp_path, NEXT), 0
    while name(policy)[:2] != name(base)[:2]:
        (policy / "config.json").write_text(str(number := number + 1))
    assert not Versions(run).publish(NEXT, step=10, folder=policy, weights_sha256="", base=Base(BASE, base))
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of another machine"))
    assert files(Versions(run).load(NEXT)) == files(policy)


@local
def test_a_version_that_is_pruned_with_its_base_while_it_is_read_is_missing(
    run: Run, three: list[Path], monkeypatch: pytest.MonkeyPatch
):
    versions, read = Versions(run), manifest_folders.read_manifest

    def meanwhile(store, prefix: str):
        if prefix == layout.version(BASE):
            for version in (NEXT, BASE):
                manifest_folders.remove(store, layout.version(version))
        return read(store, prefix)

    monkeypatch.setattr(manifest_folders, "read_manifest", meanwhile)
    with pytest.raises(Missing, match=str(NEXT)):
        versions.load(NEXT)


@local
@pytest.mark.parametrize(
    "said", [{"base": "../elsewhere", "files": []}, {"base": str(LAST), "files": []}, {"files": 3}]
)
def test_a_manifest_that_names_no_base_is_refused(run: Run, three: list[Path], said: dict):
    manifest = manifest_folders.read_manifest(run.store, layout.version(LAST))
    path = run.store.local_path(f"{layout.version(LAST)}{layout.MANIFEST}")
    assert manifest and path
    path.write_text(json.dumps({**manifest, "difference": said}))
    with pytest.raises(Damaged, match=str(LAST)):
        Versions(run).load(LAST)


def test_a_base_stays_as_long_as_a_version_that_needs_it(run: Run, three: list[Path], tmp_path: Path):
    later = [Version(number, 1) for number in (8, 9, 10)]
    publish_from(run, later[0], tmp_path, None)
    publish_from(run, later[1], tmp_path, later[0])
    assert Versions(run).prune(keep=2, every=6) == [NEXT]
    assert Versions(run).complete() == [BASE, LAST, *later[:2]]
    assert files(Versions(run).load(LAST)) == files(three[2])
    publish_from(run, later[2], tmp_path, later[0])
    assert Versions(Run.open(run.url)).prune(keep=1, every=100) == [BASE, LAST, later[1]]
    assert files(Versions(run).load(later[2])) == files(tmp_path / str(later[2]))


@local
@pytest.mark.parametrize("deletions", range(6))
def test_wherever_pruning_is_killed_what_is_left_can_be_loaded(
    run: Run, three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletions: int
):
    class Killed(BaseException): ...

    publish_from(run, Version(8, 1), tmp_path, None)
    delete, left = run.store.delete, iter(range(deletions))

    def until_killed(key: str) -> None:
        if next(left, None) is None:
            raise Killed
        delete(key)

    monkeypatch.setattr(run.store, "delete", until_killed)
    with pytest.raises(Killed):
        Versions(run).prune(keep=1, every=100)
    for version in Versions(run).complete():
        Versions(run).load(version)


@local
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_difference_whose_base_is_pruned_while_a_superseded_trainer_stores_it_does_not_exist(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """The base is gone before the difference is stored, or is removed just after it."""
    old, new = Run.open(run.url), Versions(run)
    publish_from(old, BASE, tmp_path, None)
    publish(run, tmp_path, (4, 2), (5, 2))
    if moment == "before":
        write = deltas.write

        def meanwhile(*paths: Path) -> None:
            new.prune(keep=1, every=100)
            write(*paths)

        monkeypatch.setattr(deltas, "write", meanwhile)
        with pytest.raises(Superseded, match=f"{NEXT}.* was removed while it was written"):
            publish_from(old, NEXT, tmp_path)
    else:
        delete = run.store.delete

        def too_early(key: str) -> None:
            monkeypatch.undo()
            publish_from(old, NEXT, tmp_path)
            delete(key)

        monkeypatch.setattr(run.store, "delete", too_early)
        assert NEXT in new.prune(keep=1, every=100)
        assert {BASE, NEXT} <= given_up(run).versions
    assert new.complete() == [Version(5, 2)]
