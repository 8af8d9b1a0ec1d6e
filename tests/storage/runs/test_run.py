"""A run's folder, and how it is found again."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.faulty_proxy import faulty
from benchmarks.harness.servers import Server
from storage.runs.inheritance import Parent
from storage.runs.run import Run, default_root, resolve, run_urls
from tba.errors import AlreadyExists, ConfigError, Damaged, Missing, StorageError, UnsafeStore
from tests.conftest import s3_root
from tests.support.faults.rewriting import rewrite, with_digest

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def create(root: str, name: str, **changes) -> Run:
    return Run.create(root, name, **{"config": {"seed": 3}, "sampler_sql": "select 1", "code_version": "x"} | changes)


def test_a_run_is_opened_as_it_was_created(root: str):
    create(root, "zero")
    parent = Parent(run="zero", step=4, sync=2, attempt=1, attempts=1, replays=5, rebuilt=False)
    made = create(root, "first", parent=parent)
    found = Run.open(made.url)
    assert found.url == f"{made.root}/runs/first"
    for name in ("name", "root", "url", "config", "sampler_sql", "code_version", "created_at", "parent"):
        assert getattr(found, name) == getattr(made, name)
    assert found.config == {"seed": 3}
    assert found.parent == parent
    assert [entry.key for entry in found.own.list()] == ["run.json"]


def test_requests_keep_the_deadline_that_the_run_was_given(moto: Server, monkeypatch: pytest.MonkeyPatch):
    with faulty(moto) as (proxy, server):
        root = s3_root(server, monkeypatch)
        run = Run.open(create(root, "first", config={"limits": {"store_deadline": 2.0}}).url)
        proxy.plan = ["busy"] * 1000
        with pytest.raises(StorageError, match=r"tried for 2 s"):
            run.store.create("x", b"")


def test_a_name_is_given_once(root: str):
    create(root, "first")
    with pytest.raises(AlreadyExists, match="run 'first' exists already"):
        create(root, "first", config={"seed": 4})
    assert Run.open(f"{root}/runs/first").config == {"seed": 3}


def test_folders_of_runs_are_listed_and_nothing_below_them(root: str):
    assert run_urls(root) == []
    for name in ("b", "a", "c"):
        run = create(root, name)
    run.store.create("trajectories/x", b"")
    run.store.create("runs/nested/run.json", b"")
    assert sorted(run_urls(root)) == [f"{run.root}/runs/{name}" for name in ("a", "b", "c")]


@local
def test_a_folder_without_a_run_is_named_when_asked_for(root: str):
    create(root, "first")
    (Path(root) / "runs" / "notes").mkdir()
    (Path(root) / "runs" / "notes" / "x.txt").write_text("x")
    with pytest.raises(Missing, match=r"there is no run at .*notes"):
        Run.open(f"{root}/runs/notes")


@local
@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", "x" * 101])
def test_a_name_that_is_no_name_is_refused(root: str, name: str):
    with pytest.raises(ConfigError, match="run: a name"):
        create(root, name)


@local
@pytest.mark.parametrize("content", ["", "[]", '{"run": "first"}'])
def test_a_run_that_cannot_be_read_is_damaged(root: str, content: str):
    run = create(root, "first")
    (Path(run.url) / "run.json").write_text(content)
    with pytest.raises(Damaged, match=r"first/run\.json"):
        Run.open(run.url)


@local
@pytest.mark.parametrize("name", ["/elsewhere/x", "../x", "..", "", "x/y", "x\n", "x" * 101, 3, None, ["x"]])
def test_what_a_record_calls_a_run_or_its_parent_becomes_no_path_unless_it_is_a_name(root: str, name: object):
    run = create(root, "first")
    path = Path(run.url) / "run.json"
    record = json.loads(path.read_text())
    path.write_bytes(with_digest({**record, "run": name}))
    with pytest.raises(Damaged, match=r"first/run\.json: run is not the name of a run"):
        Run.open(run.url)
    origin = {"run": name, "step": 1, "sync": 1, "attempt": 1, "attempts": 1, "replays": None, "rebuilt": False}
    path.write_bytes(with_digest({**record, "parent": origin}))
    with pytest.raises(Damaged, match=r"first/run\.json: parent.run is not the name of a run"):
        Run.open(run.url)


@local
@pytest.mark.parametrize("names", [["first"], ["first", "second"], ["first", "second", "third"]])
def test_runs_that_are_forks_of_each_other_are_damaged(root: str, names: list[str]):
    for name, parent in zip(names, [*names[1:], names[0]], strict=True):
        path = Path(create(root, name).url) / "run.json"
        origin = {"run": parent, "step": 1, "sync": 1, "attempt": 1, "attempts": 1, "replays": None, "rebuilt": False}
        rewrite(path, parent=origin)
    with pytest.raises(Damaged, match=r"first/run\.json: the parents of this run lead back to .*/first$"):
        Run.open(f"{root}/runs/first")


@local
def test_a_run_of_another_schema_is_refused(root: str):
    run = create(root, "first")
    path = Path(run.url) / "run.json"
    for later in ({**json.loads(path.read_text()), "schema_version": 2}, {"schema_version": 2}):
        path.write_bytes(with_digest(later))
        with pytest.raises(StorageError, match=r"first was written with schema version 2, but this code reads only 1"):
            Run.open(run.url)


@local
def test_a_run_that_was_moved_is_still_a_run(root: str, tmp_path: Path):
    run = create(root, "first")
    moved = Path(run.url).rename(tmp_path / "elsewhere")
    assert Run.open(str(moved)).name == "first"
    assert Run.open(f"{moved}/").root == str(tmp_path)


def test_a_run_is_not_created_on_a_store_that_is_not_safe(rclone: Server, monkeypatch: pytest.MonkeyPatch):
    root = s3_root(rclone, monkeypatch)
    with pytest.raises(UnsafeStore):
        create(root, "first")
    with pytest.raises(Missing):
        Run.open(f"{root}/runs/first")


def test_a_run_is_named_by_url_by_path_or_under_the_default_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TBA_ROOT", raising=False)
    assert default_root() == "tba-runs"
    assert resolve("first") == "tba-runs/runs/first"
    monkeypatch.setenv("TBA_ROOT", "s3://bucket/x/")
    assert resolve("first") == "s3://bucket/x/runs/first"
    assert resolve("./first") == "./first"
    assert resolve("/a/runs/first/") == "/a/runs/first"
    assert resolve("s3://b/runs/first") == "s3://b/runs/first"
