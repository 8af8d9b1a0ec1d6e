"""The check names objects that were changed after they were written, and removed objects that a later object names."""

import json
from pathlib import Path

import pytest

from storage import layout
from storage.log.ledger import find_faults, read_entries
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.objects import records
from storage.runs.events import Events
from storage.runs.retention import give_up
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.evaluations import Evaluations
from tba.errors import Damaged
from tba.types import Score, Version
from tests.support.faults.rewriting import rewrite
from tests.support.storage.synthetic import copy_run, make_run

KINDS = [
    layout.RUN, layout.STATE, layout.attempt(2), layout.sync(2), layout.ledger(2, 1), layout.evaluation(Version(2, 1)),
    layout.event("trainer", 2, 0), layout.retention(1), layout.prompts_record("train"),
    f"{layout.version(Version(1, 1))}{layout.MANIFEST}", f"{layout.checkpoint(Version(2, 1))}{layout.MANIFEST}",
]  # fmt: skip
"""One record of each kind."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(str(tmp_path_factory.mktemp("root")))
    give_up(run, versions=[Version(77, 1)], why="a test")
    return run


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    return copy_run(finished, tmp_path)


def named(run: Run, key: str) -> list[str]:
    """Return the problem that the check reports for an object, or for the folder of its manifest."""
    return [it.problem for it in check(run).problems if it.key in (key, key.removesuffix(layout.MANIFEST))]


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("record", [{}, {"a": 1}, {"a": [1.5, None, "ü"], "b": {"digest": "of another"}}])
def test_a_record_comes_back_without_its_digest(record: dict[str, object]):
    data = records.encode(record)
    assert records.has_digest(data)
    assert records.decode(data, "it") == record
    assert records.encode(json.loads(data)) == data


def test_no_flipped_bit_of_a_record_changes_what_it_says_unnoticed():
    record = {"step": 12, "value": 0.25, "text": "a \"digest\": 'x'", "none": None}
    data = records.encode(record)
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            try:
                found = records.decode(bytes(flipped), "it")
            except Damaged:
                continue
            assert found == record or not records.has_digest(bytes(flipped))
            assert {name: found.get(name) for name in record} == record


@pytest.mark.parametrize("key", KINDS)
def test_a_number_that_was_changed_in_a_record_is_named(whole: Run, key: str):
    path = Path(whole.url, key)
    text = path.read_text()
    place = next(i for i, character in enumerate(text) if character in "12345678" and text[i - 1] in " :")
    flip(path, place, bit=3 if text[place] in "01" else 0)
    if key == layout.RUN:
        with pytest.raises(Damaged, match=r"run\.json"):
            Run.open(whole.url)
    else:
        assert named(whole, key)


@pytest.mark.parametrize("key", KINDS[1:])
def test_a_record_that_lost_its_digest_is_named(whole: Run, key: str):
    path = Path(whole.url, key)
    path.write_text(path.read_text().replace('"digest"', '"dogest"'))
    assert any("digest" in problem for problem in named(whole, key))


def test_records_of_an_older_run_are_read_and_told_to_be_unverified(whole: Run):
    for path in Path(whole.url).rglob("*.json"):
        plain = json.loads(path.read_bytes())
        plain.pop("digest", None)
        if path.name == layout.RUN:
            del plain["digests"]
        if path.parent.name == "ledger" or path.parent.name == "prompts":
            path.unlink()
        elif path.parent.name != "syncs" and plain:
            path.write_text(json.dumps(plain))
    for number in range(5):
        path = Path(whole.url, layout.sync(number))
        plain = json.loads(path.read_bytes())
        before = Path(whole.url, layout.sync(number - 1))
        plain["previous_sha256"] = records.sha256_of(whole.store, layout.sync(number - 1)) if before.exists() else None
        path.write_text(json.dumps({name: value for name, value in plain.items() if name != "digest"}))
    for chained in ("attempts", "retention", "evaluations", "events"):
        for path in Path(whole.url, chained).rglob("*.json"):
            plain = json.loads(path.read_bytes())
            path.write_text(json.dumps({n: v for n, v in plain.items() if n not in ("previous", "previous_sha256")}))
    findings = check(Run.open(whole.url))
    assert findings.problems == []
    notes = "\n".join(findings.notes)
    assert "records have no digest and are not verified" in notes
    assert "the ledger of 4 syncs has no digests" in notes
    assert f"{layout.prompts('train')} has no digest" in notes
    claim_attempt(whole)  # works as before
    assert read_entries(whole, 2, 1) and read_prompts(whole, "train")


@pytest.mark.parametrize("places", [8, pytest.param(80, marks=pytest.mark.long)])
@pytest.mark.parametrize("key", [layout.draws(2, 1), layout.steps(2, 1), layout.prompts("train")])
def test_any_flipped_byte_of_what_a_record_describes_is_named(whole: Run, key: str, places: int):
    path = Path(whole.url, key)
    size = path.stat().st_size
    for place in range(0, size, max(1, size // places)):
        flip(path, place, bit=place % 8)
        assert named(whole, key), place
        flip(path, place, bit=place % 8)
    assert check(whole).ok


def test_whoever_reads_a_damaged_ledger_is_told(whole: Run):
    assert list(find_faults(whole, [Version(1, 1), Version(2, 1)])) == []
    flip(Path(whole.url, layout.steps(2, 1)), 100)
    with pytest.raises(Damaged, match=r"steps/000002-a0001\.parquet"):
        read_entries(whole, 2, 1)
    [fault] = find_faults(whole, [Version(1, 1), Version(2, 1)])
    assert layout.steps(2, 1) in fault


def test_a_ledger_record_that_is_gone_is_missed(whole: Run):
    whole.store.delete(layout.ledger(1, 1))
    assert named(whole, layout.ledger(1, 1)) == ["is missing, but a version or a checkpoint has gone past it"]


def test_a_ledger_record_that_was_replaced_is_named_by_the_one_after_it(whole: Run):
    rewrite(Path(whole.url, layout.ledger(1, 1)), created_at="2030-01-01T00:00:00+00:00")
    [problem] = named(whole, layout.ledger(1, 1))
    assert layout.ledger(2, 1) in problem


@pytest.mark.parametrize("key", [layout.attempt(1), layout.evaluation(Version(0, 1))])
def test_a_record_that_was_replaced_is_named_by_the_one_after_it(whole: Run, key: str):
    rewrite(Path(whole.url, key), created_at="2030-01-01T00:00:00+00:00")
    [problem] = named(whole, key)
    assert "sha256 differs" in problem


def test_an_evaluation_that_is_gone_is_missed_and_its_version_is_not_evaluated_again(whole: Run):
    assert Version(0, 1) in Evaluations(whole).done()
    whole.store.delete(layout.evaluation(Version(0, 1)))
    assert named(whole, layout.evaluation(Version(0, 1)))
    assert Version(0, 1) in Evaluations(whole).done()


def test_scores_of_another_evaluator_are_the_ones_before(whole: Run):
    version = Version(3, 2)
    Evaluations(whole).write([Score(version=version, step=6, metric="greedy", value=0.5, n=1, seconds=0.1)])
    previous = records.read(whole.store, layout.evaluation(version))["previous"]
    assert (previous["version"], previous["attempt"]) == (4, 2)
    assert check(whole).ok


def test_an_event_that_is_gone_is_missed(whole: Run):
    events = Events(whole, "trainer", 3)
    for number in range(3):
        events.write("noted", f"number {number}")
    assert check(whole).ok
    whole.store.delete(layout.event("trainer", 3, 1))
    assert named(whole, layout.event("trainer", 3, 1))


def test_a_retention_record_that_is_gone_is_missed(whole: Run):
    give_up(whole, versions=[Version(78, 1)], why="a test")
    assert check(whole).ok
    whole.store.delete(layout.retention(1))
    assert named(whole, layout.retention(1))
