"""This version of the program reads what earlier versions stored. The runs under tests/data are kept as they were
written, with the results that their version found in them (see tests/make_stored_run.py). This version also reads what
a later version stores in the same version of the format: each test runs again with additions to every object."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.commands import audit, fork, watch
from flows.pages.markdown import markdown
from flows.pages.report.page import write as write_report
from flows.planning import create
from flows.planning.run_summary import summarise
from flows.roles import role, wiring
from flows.roles.buffer_process import make_buffer
from flows.roles.repeat_steps import restore_trainer
from storage.log.ledger import read_entries
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.runs.attempts import chain, newest_attempt
from storage.runs.control import change_state
from storage.runs.events import Events
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.config import parse
from tba.errors import ConfigError
from tba.models.policy import Policy
from tests.make_stored_run import answer, drawn, search
from tests.support.faults.later import add_to_everything
from tests.support.faults.rewriting import with_digest
from tests.support.flows.live_roles import live
from tests.support.sampled_parameters import sampled

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "data").glob("*/expected.json"))
OTHER_MACHINES = 0.01
"""Allowed relative difference between the results of two kinds of machines."""


CONTENTS = {"files", "bytes", "stored_bytes", "sha256", "previous_sha256"}
"""Columns that change if something is added to an object."""


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a kept root, because the original must not change."""
    return shutil.copytree(request.param, tmp_path / "root")


@pytest.fixture(params=sampled([False, True], kept=[False]), ids=["as it is", "with additions"])
def additions(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def root(stored: Path, additions: bool) -> Path:
    if additions:
        add_to_everything(stored, list(json.loads((stored / "expected.json").read_text())))
    return stored


@pytest.fixture
def expected(root: Path) -> dict[str, Any]:
    return json.loads((root / "expected.json").read_text())


def opened(root: Path, name: str = "whole") -> Run:
    return Run.open(str(root / "runs" / name))


def test_there_are_stored_runs_without_and_with_digests():
    digests = {json.loads((it / "runs/whole/run.json").read_text()).get("digests", False) for it in FOLDERS}
    assert digests == {False, True}


def test_a_check_finds_everything_and_nothing_wrong(root: Path, expected: dict[str, Any]):
    for name in expected:
        findings = check(opened(root, name))
        assert findings.problems == []
        said = expected[name]["checked"]
        assert {kind: findings.checked.get(kind) for kind in said} == said  # a later version may count more kinds


def test_queries_find_what_they_found_when_it_was_stored(root: Path, expected: dict[str, Any], additions: bool):
    ignored = CONTENTS if additions else set()
    for name in expected:
        with storage.connect(opened(root, name)) as con:
            for asked in expected[name]["answers"]:
                columns = asked["query"].removeprefix("select ").partition(" from ")[0].split(", ")
                kept = [place for place, column in enumerate(columns) if column not in ignored]
                found, said = (
                    [json.loads(row) for row in rows] for rows in (answer(con, asked["query"]), asked["rows"])
                )
                assert [[_rounded(row[place]) for place in kept] for row in found] == [
                    [_rounded(row[place]) for place in kept] for row in said
                ], asked["query"]


def _rounded(value: Any) -> Any:
    """Return a value without the last digits of a float, because the threads of DuckDB add rows in any order."""
    return float(f"{value:.12g}") if isinstance(value, float) else value


def test_a_report_can_be_made(root: Path, expected: dict[str, Any], tmp_path: Path):
    for name in expected:
        assert name in Path(write_report(opened(root, name), str(tmp_path / f"{name}.html"))).read_text()


def test_the_records_give_the_draws_that_the_ledger_has(root: Path):
    run = opened(root)
    config = parse(run.config)
    buffer = make_buffer(run, config, newest_attempt(run), Events(run, "past", 0))
    for sync in range(1, config.last_sync + 1):
        attempt = next(span.attempt for span in chain(run) if span.covers(sync))
        for entry in read_entries(run, sync, attempt):
            buffer.replay(config.sync_before(entry.step["step"]))
            draws = buffer.draw(entry.step["step"])
            assert len(draws) == config.batch
            for draw, said in zip(draws, entry.draws, strict=True):
                assert {name: said[name] for name in draw.__slots__ if name != "weight"} == {
                    name: getattr(draw, name) for name in draw.__slots__ if name != "weight"
                }
                assert draw.weight == pytest.approx(said["weight"])
            assert buffer.fetch(draws).prompt_ids == [it["prompt_id"] for it in entry.draws]


@pytest.mark.parametrize(("name", "step"), [("whole", 2), ("whole", 6), ("whole", 10), ("replayed", 9)])
def test_a_step_can_be_taken_again(root: Path, name: str, step: int):
    """The first step is left out, because its log-ratios are only rounding errors around 0."""
    found = audit.audit(opened(root, name), step, tolerance=OTHER_MACHINES)
    assert [it for it in (*found.compared, *found.rows) if not it.agrees] == []
    assert found.batch == 8


def test_a_past_begins_at_a_stored_checkpoint(root: Path):
    assert restore_trainer(opened(root), 10).step == 8


def test_every_version_that_is_kept_loads_with_the_weights_it_was_published_with(root: Path):
    versions = Versions(opened(root))
    for version in versions.complete():
        policy = Policy.load(versions.load(version), dtype="float32", device="cpu")
        stored = versions.weights_sha256(version)
        assert policy.snapshot().digest_like(stored) == stored


@pytest.mark.parametrize("step", [0, 8])
def test_a_fork_replays_what_its_parent_recorded(root: Path, expected: dict[str, Any], step: int):
    run = fork.fork(opened(root), step, {}, name="again", replay=True)
    assert live(run, "trainer", wiring.run_trainer) == []
    assert drawn(run) == expected["whole"]["drawn"]
    assert check(run).problems == []


def test_a_trainer_that_was_killed_is_resumed(root: Path, expected: dict[str, Any]):
    """If the stored ledger has no column `advantage`, only the rows of new steps have a value there."""
    run = opened(root, "replayed")
    advantages = "select count(advantage) > 0, count(*) > count(advantage) from draws"
    with storage.connect(run) as con:
        had_column, lacked_column = con.execute(advantages).fetchone() or (None, None)
        assert had_column is not lacked_column
    assert live(run, "trainer", wiring.run_trainer) == []
    with storage.connect(run) as con:
        assert con.execute(advantages).fetchone() == (True, lacked_column)
    assert drawn(run) == expected["whole"]["drawn"]
    assert check(run).problems == []


def test_a_run_with_unknown_settings_can_be_looked_at_but_not_continued(stored: Path, tmp_path: Path):
    known = summarise(opened(stored, "replayed"))
    path = stored / "runs" / "replayed" / "run.json"
    record = json.loads(path.read_text())
    record["config"]["limits"]["added_later"] = 1
    record["config"]["added_section"] = {"x": {"y": 2}}
    path.write_bytes(with_digest(record))
    run = opened(stored, "replayed")
    assert summarise(run) == known and known.state == "interrupted"
    assert check(run).problems == []
    assert len(drawn(run)) == 9
    assert "replayed" in Path(write_report(run, str(tmp_path / "report.html"))).read_text()
    assert "Run replayed" in markdown(run)
    assert watch.look(run).summary == known
    before = sorted(entry.key for entry in run.store.list())
    for go_on in (
        lambda: create.resume(run.url),
        lambda: audit.audit(run, 9),
        lambda: fork.fork(run, 9, {}, name="x"),
        lambda: role.live("trainer", 0, run),
    ):
        with pytest.raises(ConfigError, match=r"unknown setting 'limits.added_later'") as refused:
            go_on()
        assert "unknown setting 'added_section'" in str(refused.value)
    assert sorted(entry.key for entry in run.store.list()) == before


def test_a_fork_takes_more_steps_than_its_parent(root: Path):
    """The fork has its own searcher, which continues the numbers of the rounds."""
    run = fork.fork(opened(root), 10, {"training.steps": "14"}, name="further")
    rounds = Trajectories(run).next_seq(0)
    search(run)
    assert Trajectories(run).next_seq(0) == rounds + 1
    assert live(run, "trainer", wiring.run_trainer) == []
    assert sorted(map(int, drawn(run))) == list(range(1, 15))
    change_state(run, desired="stop", why="finished")
    assert check(run).problems == []
