"""Roles as processes, on a store that fails and on a full disk."""

from pathlib import Path
from typing import Any, get_args

import pytest

import storage
from benchmarks.harness.faulty_proxy import Fault, Operation, faulty
from benchmarks.harness.servers import Server
from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create, resolve
from storage.maintenance.check import check
from storage.runs.attempts import newest_attempt
from storage.runs.control import change_state
from storage.runs.run import Run
from tests.conftest import s3_root
from tests.support.faults.small_disk import small_disk
from tests.support.flows.killed_runs import RoleProcess
from tests.support.flows.roles import TINY

STEPS = 6
FAULTS: list[Fault] = [fault for fault in get_args(Fault) if fault not in ("pass", "silent", "late")]  # quick faults

pytestmark = pytest.mark.slow


def start(root: str, folder: Path, **changes: Any) -> Run:
    settings = {**TINY, "model.path": str(tiny_folder(folder / "policy")), "training.steps": STEPS, **changes}
    return create.start(resolve.resolve("quickstart", settings), root, "r")


class Life:
    """One life of a role as a process."""

    def __init__(self, run: Run, role: str, log: Path):
        self.log = log.with_name(f"{role}-{len(list(log.parent.glob('*.log')))}.log")
        self.log.touch()
        self.process = RoleProcess([role, "--run", run.url], output=str(self.log))

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        return self.process.wait(120)

    def said(self) -> str:
        return self.log.read_text()


def assert_whole(run: Run) -> None:
    assert check(run).problems == []
    with storage.connect(run) as con:
        assert con.sql("select step from steps order by step").fetchall() == [(n + 1,) for n in range(STEPS)]
        drawn = con.sql("select count(*), count(distinct (step, slot, position)) from draws").fetchall()
        doubled = con.sql("select count(*) - count(distinct trajectory_id) from trajectories").fetchall()
    each = run.config["training"]["prompts_per_step"] * run.config["training"]["responses_per_prompt"]
    assert (drawn, doubled) == ([(STEPS * each, STEPS * each)], [(0,)])


def test_roles_on_a_store_that_fails_now_and_then_end_as_they_should(
    moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    root = s3_root(moto, monkeypatch)
    run = start(root, tmp_path)
    with faulty(moto) as (proxy, server):
        proxy.operations, proxy.lag = get_args(Operation), 5
        proxy.at_random(0, 0.15, FAULTS)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        trainer, searcher = (Life(run, role, tmp_path / "log") for role in ("trainer", "searcher"))
        assert trainer.end() == 0, trainer.said()
        change_state(run, desired="stop", why="enough")
        assert searcher.end() == 4, searcher.said()
        assert proxy.met["pass"] < 0.95 * proxy.met.total()
    assert_whole(run)


def test_roles_that_hit_a_full_disk_say_so_and_go_on_once_there_is_room(tmp_path: Path):
    with small_disk(tmp_path / "disk", "size=16m") as disk:
        run = start(str(disk.folder), tmp_path, **{"sync.checkpoint_every": 1})
        disk.fill(room=160)  # pages for the first version and a few rounds; a sync takes about 100 pages
        for role in [Life(run, role, tmp_path / "log") for role in ("trainer", "searcher")]:
            assert role.end() == 1, role.said()
            assert "StorageError" in role.said().splitlines()[-1] and "No space left on device" in role.said()
        assert check(run).problems == []
        disk.free()
        trainer = Life(run, "trainer", tmp_path / "log")  # without a searcher: the stored rounds are enough
        assert trainer.end() == 0, trainer.said()
        assert newest_attempt(run) == 2
        assert_whole(run)
