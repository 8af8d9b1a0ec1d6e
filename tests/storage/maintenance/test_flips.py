"""If any byte of a stored run is damaged, `tba check` names the object, or all answers stay the same.

`benchmarks/flips` damages thousands of bytes in the same way."""

import random
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.flips import judging
from benchmarks.flips.damage import REMOVALS, Damage, kind_of, parquet_parts, plan_damage
from benchmarks.flips.judging import FINDINGS, Subject
from benchmarks.flips.small_run import make_runs
from storage import layout
from storage.maintenance.check import Findings, Problem
from storage.objects.open_store import open_store


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("flips")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBA_CACHE", str(folder / "cache"))
        yield Subject(str(folder), make_runs(str(folder)), folder / "cache")


def planned(subject: Subject, number: int, *, removals: bool = False) -> list[Damage]:
    root = layout.root_of(subject.urls["whole"])
    return plan_damage(root, sorted(subject.urls), number, random.Random(0), removals=removals)


def contents(subject: Subject) -> Mapping[str, bytes]:
    return {
        f"{name}/{entry.key}": store.read(entry.key)
        for name, url in subject.urls.items()
        for store in [open_store(url)]
        for entry in store.list()
    }


def test_the_small_run_is_whole_and_answers_everything_without_an_error(subject: Subject):
    assert set(map(tuple, subject.known.values())) == {()}
    assert {name: answer for name, answer in subject.whole.items() if answer.startswith("error")} == {}


def test_flips_reach_every_kind_of_object_and_every_part_of_a_parquet_object(subject: Subject):
    damage = planned(subject, 2000)
    stored = {kind_of(name.partition("/")[2]) for name in contents(subject)}
    assert {it.kind for it in damage} == stored
    assert stored >= {"run.json", "syncs", "compactions: records", "versions: differences", "checkpoints: manifests"}
    parts = {"magic", "length", "footer", "page headers", "pages"}
    assert {it.part for it in damage if it.kind == "draws"} == parts


def test_the_parts_of_a_parquet_object_are_all_of_its_bytes():
    table = pa.table({"numbers": list(range(5000)), "names": [f"{number % 7}" for number in range(5000)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2000, data_page_size=1000, write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    ranges = sorted(it for places in parquet_parts(data).values() for it in places)
    assert ranges[0][0] == 0 and ranges[-1][1] == len(data)
    assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert len(parquet_parts(data)["page headers"]) > 6


def other_byte(subject: Subject, run: str, key: str, text: bytes) -> Damage:
    """Return a flip of one bit at the end of a text in an object."""
    data = open_store(subject.urls[run]).read(key)
    offset = data.index(text) + len(text) - 1
    return Damage(run, kind_of(key), key, "bit", offset=offset, old=data[offset], new=data[offset] ^ 1)


def say_of_every_run(monkeypatch: pytest.MonkeyPatch, *problems: Problem) -> None:
    monkeypatch.setattr(judging, "check", lambda run: Findings(run.name, problems=[*problems]))


@pytest.mark.parametrize(
    ("key", "text", "answer"),
    [
        (layout.lease("trainer"), b"stopped", "whole: leases: "),
        (layout.retention(3), b"response_tokens", "whole: payloads given up: "),
        ("versions/000000-a0001/config.json", b'size": 8', "whole: versions/000000-a0001: error: "),
    ],
)
def test_where_the_check_finds_nothing_an_answer_that_changes_is_a_finding(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, key: str, text: bytes, answer: str
):
    say_of_every_run(monkeypatch)
    judged = subject.judge(other_byte(subject, "whole", key, text))
    assert judged.verdict == "changed"
    assert any(reason.startswith(answer) for reason in judged.reasons)


def test_a_problem_is_about_an_object_or_about_another(subject: Subject, monkeypatch: pytest.MonkeyPatch):
    damage = other_byte(subject, "whole", "versions/000000-a0001/config.json", b"size")
    for key, verdict in ((damage.key, "named"), ("versions/000000-a0001/", "named"), ("syncs/", "named by another")):
        say_of_every_run(monkeypatch, Problem(key, "is odd"))
        assert subject.judge(damage).verdict == verdict


def test_an_error_that_is_none_of_ours_is_a_finding(subject: Subject, monkeypatch: pytest.MonkeyPatch):
    before = contents(subject)
    monkeypatch.setattr(judging, "check", lambda run: {}["nothing"])
    judged = subject.judge(other_byte(subject, "whole", layout.lease("trainer"), b"stopped"))
    assert (judged.verdict, "KeyError" in judged.reasons[0]) == ("crashed", True)
    assert contents(subject) == before


def test_what_is_removed_cut_or_doubled_is_put_back(subject: Subject):
    before, damage = contents(subject), planned(subject, len(REMOVALS), removals=True)
    assert {it.how for it in damage} == {*REMOVALS}
    for it in damage:
        subject.judge(it)
    assert contents(subject) == before


@pytest.mark.parametrize("flips", [40, pytest.param(400, marks=pytest.mark.long)])
def test_a_flip_is_named_by_the_check_or_changes_no_answer(subject: Subject, flips: int):
    judged = [subject.judge(damage) for damage in planned(subject, flips)]
    assert [f"{it.verdict}: {it.damage}: {it.reasons}" for it in judged if it.verdict in FINDINGS] == []
