"""`tba check` and `tba export` of a version, also where stored objects are missing or damaged."""

import json
import os
import shutil
from pathlib import Path

import pytest

from flows.cli import main
from storage import layout
from storage.runs.run import Run
from tba.types import Version
from tests.support.flows.command_line import printed, refused
from tests.support.storage.synthetic import PROMPTS, S


def test_check_ends_with_0_when_all_is_well(capsys: pytest.CaptureFixture[str]):
    assert "nothing is missing or doubled" in printed(capsys, "check", "first")
    told = json.loads(printed(capsys, "check", "first", "--json"))
    assert told["ok"] is True
    assert told["problems"] == []
    assert told["checked"]["trajectories"] == 7 * 2 * 2 * S
    assert told["checked"]["prompts"] == len(PROMPTS) + 1


def test_check_ends_with_1_when_something_is_wrong(first: Run, capsys: pytest.CaptureFixture[str]):
    first.store.delete(layout.shard(0, 1))
    assert main(["check", first.url]) == 1
    assert f"wrong: {layout.shard(0, 1)}: is missing" in capsys.readouterr().out
    assert main(["check", first.url, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["problems"] == [{"key": layout.shard(0, 1), "problem": "is missing"}]


@pytest.mark.parametrize("version", [Version(1, 1), Version(4, 2)], ids=["stored whole", "stored as a difference"])
def test_export_copies_the_files_of_a_version(
    first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: Version
):
    target = tmp_path / "policy"
    assert printed(capsys, "export", first.url, "--version", str(version.number), str(target)) == f"{target}\n"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == f"weights {version}".encode() * 20


def test_export_takes_the_newest_attempt_unless_told(first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for attempt, arguments in ((2, ()), (1, ("--attempt", "1"))):
        target = tmp_path / f"of-{attempt}"
        printed(capsys, "export", first.url, "--version", "2", *arguments, str(target))
        assert (target / "model.safetensors").read_bytes().startswith(f"weights 000002-a000{attempt}".encode())


def test_a_version_that_was_abandoned_is_exported_by_its_attempt_alone(
    first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.rmtree(Path(first.url, "versions", str(Version(3, 2))))
    assert "kept: 0, 1, 2, 4" in refused(capsys, "export", first.url, "--version", "3", str(tmp_path / "none"))
    printed(capsys, "export", first.url, "--version", "3", "--attempt", "1", str(tmp_path / "old"))
    assert (tmp_path / "old" / "model.safetensors").exists()


def test_export_refuses_what_it_cannot_do(first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    assert "not an empty folder" in refused(capsys, "export", first.url, "--version", "4", str(full))
    assert "kept: 0, 1, 2, 3, 4" in refused(capsys, "export", first.url, "--version", "9", str(tmp_path / "new"))
    assert os.listdir(full) == ["mine"]


def test_export_of_damaged_weights_leaves_nothing_behind(
    first: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    Path(first.url, "versions/000002-a0002/model.safetensors").write_bytes(b"weights 000002-a0001" * 20)
    target = tmp_path / "out" / "policy"
    target.parent.mkdir()
    assert main(["export", first.url, "--version", "2", str(target)]) == 1
    assert "model.safetensors" in capsys.readouterr().err
    assert list(target.parent.iterdir()) == []
