"""`tba give-up`: a run whose records admit a lost shard is not resumed until the shard is restored or given up."""

import json
from pathlib import Path

import pytest

from flows.cli import main
from flows.commands.give_up import give_up
from flows.planning import create
from storage import layout
from storage.runs import retention
from storage.runs.control import read_state
from storage.runs.held_lease import HeldLease
from storage.runs.retention import GivenUpShards, given_up
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from tba.errors import ConfigError, Damaged
from tests.support.storage.synthetic import make_run

LOST = layout.shard(0, 3)


@pytest.fixture
def damaged(tmp_path: Path) -> Run:
    run = make_run(str(tmp_path))
    Path(run.url, LOST).unlink()
    return run


def test_a_run_that_lost_a_shard_is_not_resumed_and_nothing_of_it_changes(damaged: Run):
    before = {entry.key: damaged.store.read(entry.key) for entry in damaged.store.list()}
    with pytest.raises(Damaged, match=r"seq=00000003\.parquet.* is missing.*tba give-up"):
        create.resume(damaged.url)
    assert {entry.key: damaged.store.read(entry.key) for entry in damaged.store.list()} == before


def test_a_run_goes_on_once_its_shard_is_restored(damaged: Run, tmp_path: Path):
    other = make_run(str(tmp_path / "again"))  # the same run again, as its seed is fixed
    content = Path(other.url, LOST).read_bytes()
    Path(damaged.url, LOST).write_bytes(content)
    create.resume(damaged.url)
    assert read_state(damaged).desired == "run"


def test_a_run_goes_on_once_its_shard_is_given_up(damaged: Run, capsys: pytest.CaptureFixture[str]):
    assert main(["give-up", damaged.url, LOST, "--why", "the disk lost it", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"run": "first", "retention": told["retention"], "shards": {LOST: "is missing"}}
    record = json.loads(damaged.store.read(layout.retention(told["retention"])))
    assert record["why"] == "the disk lost it"
    assert record["removed"]["shards"] == {"keys": [LOST], "first_sync": 3, "attempt": 2}
    create.resume(damaged.url)
    assert main(["check", damaged.url]) == 0
    assert f"{LOST} was lost and is given up" in capsys.readouterr().out


def test_without_keys_all_that_is_lost_is_given_up(damaged: Run, capsys: pytest.CaptureFixture[str]):
    other = layout.shard(1, 2)
    Path(damaged.url, other).write_bytes(b"short")
    assert main(["give-up", damaged.url]) == 0
    assert given_up(damaged).shards == {LOST, other}
    capsys.readouterr()
    assert main(["give-up", damaged.url]) == 0
    assert "has lost no shard" in capsys.readouterr().out


def test_what_is_whole_cannot_be_given_up(damaged: Run):
    for key in (layout.shard(0, 2), "run.json", "nonsense"):
        with pytest.raises(ConfigError, match=f"KEY: {key}"):
            give_up(damaged, [LOST, key], why="a test")
    assert given_up(damaged).shards == frozenset()


def test_a_run_with_a_living_supervisor_is_left_alone(damaged: Run):
    with HeldLease(damaged, "supervisor", every=0.1), pytest.raises(ConfigError, match="already has a supervisor"):
        give_up(damaged, [], why="a test")
    assert given_up(damaged).shards == frozenset()


def test_a_step_that_was_taken_with_a_shard_that_is_given_up_since_is_not_audited(
    damaged: Run, capsys: pytest.CaptureFixture[str]
):
    give_up(damaged, [], why="a test")
    assert main(["audit", damaged.url, "--step", "8"]) == 2
    assert "retention/" in capsys.readouterr().err


def test_a_step_is_not_audited_if_a_step_to_be_repeated_before_it_used_a_shard_that_is_given_up(
    damaged: Run, capsys: pytest.CaptureFixture[str]
):
    """The step's own attempt never held the shard, but no checkpoint of that attempt is left to begin at."""
    shards = GivenUpShards(keys=(layout.shard(0, 0),), first_sync=1, attempt=1)
    number = retention.give_up(damaged, shards=shards, why="a test")
    for version in Checkpoints(damaged).complete():
        damaged.store.delete(f"{layout.checkpoint(version)}{layout.MANIFEST}")
    assert main(["audit", damaged.url, "--step", "8"]) == 2
    assert (
        f"step 8 of first follows step 4, which was taken while the buffer held shards that {layout.retention(number)}"
        in (capsys.readouterr().err)
    )


def test_the_command_to_resume_is_shown_with_the_url_of_the_run(damaged: Run, capsys: pytest.CaptureFixture[str]):
    assert main(["give-up", damaged.url]) == 0
    assert f"`tba resume {damaged.url}` goes on" in capsys.readouterr().out
