"""The check finds records that are missing, doubled or contradict each other."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import layout
from storage.log.schema import encode
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.objects import manifest_folders
from storage.runs.run import Run
from tba.types import Version
from tests.support.builders import make_shard
from tests.support.faults.check_problems import reports
from tests.support.faults.rewriting import describe_again, replace_text, rewrite, with_digest
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import PROMPTS, B, K, copy_run, make_run
from tests.support.storage.synthetic_forks import fork


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    """Return a copy of a finished run that a test may damage."""
    return copy_run(finished, tmp_path)


@pytest.fixture
def parent(finished: Run, tmp_path: Path) -> Run:
    """Return a copy in a root of its own, in which forks can be made."""
    return copy_run(finished, tmp_path / "runs")


def rewrite_json(run: Run, key: str, **changes: Any) -> None:
    rewrite(path_of(run, key), **changes)


def rewrite_parquet(run: Run, key: str, change: Any) -> None:
    table = pq.read_table(io.BytesIO(run.store.read(key)))
    pq.write_table(change(table), path_of(run, key))
    describe_again(run, key)


# --- things that are missing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        layout.shard(0, 0),
        layout.sync(0),
        layout.sync(2),
        layout.draws(1, 1),
        layout.steps(2, 1),
        layout.draws(4, 2),
        layout.steps(4, 2),
        layout.attempt(1),
        layout.prompts("train"),
        layout.prompts("test"),
        "versions/000002-a0001/config.json",
        "versions/000004-a0002/model.safetensors.xor.zst",
        "checkpoints/000004-a0002/model.safetensors",
    ],
)
def test_an_object_that_is_gone_is_missed(whole: Run, key: str):
    whole.store.delete(key)
    findings = check(whole)
    assert reports(findings, key) or reports(findings, key.rpartition("/")[0], "is gone")


@pytest.mark.parametrize("version", [Version(0, 1), Version(1, 1), Version(4, 2)])
def test_a_version_that_something_cites_is_missed(whole: Run, version: Version):
    for entry in whole.store.list(layout.version(version)):
        whole.store.delete(entry.key)
    assert any(
        "neither stored nor given up" in it.problem and str(version) in it.key + it.problem
        for it in check(whole).problems
    )


def test_a_checkpoint_that_an_attempt_continues_is_missed(whole: Run):
    for entry in whole.store.list(layout.checkpoint(Version(2, 1))):
        whole.store.delete(entry.key)
    assert reports(check(whole), layout.attempt(2), "neither stored nor given up")


def test_prompts_that_are_gone_are_one_problem_not_one_for_each(whole: Run):
    for split in ("train", "test"):
        whole.store.delete(layout.prompts(split))
    assert [(it.key, it.problem) for it in check(whole).problems] == [
        (layout.prompts("train"), "is missing, but there are trajectories"),
        (layout.prompts("test"), "is missing, but there are evaluations"),
    ]


def test_a_record_of_prompts_that_cannot_be_read_is_one_problem_and_not_missing_too(whole: Run):
    path_of(whole, layout.prompts_record("train")).write_bytes(b"no record")
    [problem] = check(whole).problems
    assert problem.key == layout.prompts_record("train") and "is not JSON" in problem.problem


def test_prompts_of_another_schema_or_of_none_of_the_trajectories_are_found(whole: Run):
    rewrite_parquet(whole, layout.prompts("test"), lambda table: table.drop_columns(["answer"]))
    rewrite_parquet(whole, layout.prompts("train"), lambda table: table.slice(0, 0))
    findings = check(whole)
    assert reports(findings, layout.prompts("test"), "'answer' occurs 0 times")
    assert reports(findings, "trajectories", f"answer {PROMPTS[0]}, which is not among the stored prompts")


def test_a_record_that_admits_what_no_shard_is_called_is_found(whole: Run):
    record = json.loads(whole.store.read(layout.sync(4)))
    record["shards"][0]["key"] = "../../first"
    rewrite_json(whole, layout.sync(4), shards=record["shards"])
    assert reports(check(whole), layout.sync(4), "'../../first', which is not the name of a shard")


def test_a_gap_in_the_records_is_named_once(whole: Run):
    whole.store.delete(layout.sync(1))
    findings = check(whole)
    assert reports(findings, layout.sync(1), "is missing, but")


def test_what_a_ledger_record_describes_is_missed_also_of_an_abandoned_attempt(whole: Run):
    whole.store.delete(layout.steps(3, 1))
    assert reports(check(whole), layout.steps(3, 1), "is missing")


def test_a_base_that_is_gone_is_named_with_each_version_that_needs_it(whole: Run):
    manifest_folders.remove(whole.store, "versions/000002-a0002/")
    assert [(it.key, "versions/000002-a0002/ does not exist" in it.problem) for it in check(whole).problems] == [
        (f"versions/{number:06d}-a0002/", True) for number in (3, 4)
    ]


# --- things that are doubled, or contradict each other ----------------------------------------------------------------


def test_a_place_in_a_round_that_is_filled_twice_is_found(whole: Run):
    Trajectories(whole).append(0, 40, make_shard({PROMPTS[0]: [1.0]}, round=2))
    assert reports(check(whole), "trajectories", "searcher 0 round 2 slot 0 is stored 2 times")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("garbage", "JSON"),
        ('{"fork": "fork"}', "lacks 'run'"),
        (None, "is the record of a fork of another run, 'another'"),
    ],
)
def test_a_record_of_a_fork_that_makes_no_sense_is_found(parent: Run, content: str | None, problem: str):
    fork(parent, 2)
    key = layout.fork("fork")
    assert check(parent).checked["forks"] == 1
    if content:
        path_of(parent, key).write_text(content)
    else:
        replace_text(path_of(parent, key), '"run": "first"', '"run": "another"')
    findings = check(parent)
    assert reports(findings, key, problem) and len(findings.problems) == 1


def test_a_fork_that_its_parent_does_not_know_is_found(parent: Run):
    run, key = fork(parent, 2), layout.fork("fork")
    rewrite_json(parent, key, added="by a later version")
    assert check(run).ok
    fork(parent, 4, "another")
    path_of(parent, layout.fork("another")).write_text("{")  # the parent is responsible for this object
    assert check(run).ok
    rewrite_json(parent, key, sync=1)
    assert reports(
        check(run), layout.RUN, "its parent's record of this fork in forks/ has another origin than run.json"
    )
    parent.store.delete(key)
    assert reports(
        check(run),
        layout.RUN,
        "its parent has no record of this fork in forks/, so pruning may remove what it needs",
    )


def test_a_shard_that_is_admitted_twice_is_found(whole: Run):
    record = json.loads(whole.store.read(layout.sync(4)))
    first = json.loads(whole.store.read(layout.sync(0)))["shards"][0]
    rewrite_json(whole, layout.sync(4), shards=[*record["shards"], first], rows=record["rows"] + first["rows"])
    assert reports(check(whole), layout.sync(4), "had admitted already")


def test_a_copy_of_another_searchers_shard_is_found(whole: Run):
    data = whole.store.read(layout.shard(1, 6))
    path_of(whole, layout.shard(0, 60)).write_bytes(data)
    assert reports(check(whole), layout.shard(0, 60))


def test_a_version_of_other_weights_than_the_ledger_says_is_found(whole: Run):
    key = layout.version(Version(3, 2)) + layout.MANIFEST
    rewrite_json(whole, key, weights_sha256="f" * 64)
    findings = check(whole)
    assert reports(findings, layout.version(Version(3, 2)), f"another digest of its weights than {layout.steps(3, 2)}")
    assert len(findings.problems) == 1
    record = json.loads(whole.store.read(key))
    del record["weights_sha256"]
    path_of(whole, key).write_bytes(with_digest(record))
    assert check(whole).ok


def test_draws_that_are_missing_are_found(whole: Run):
    rewrite_parquet(whole, layout.draws(2, 1), lambda table: table.slice(1))
    assert reports(check(whole), layout.draws(2, 1), f"step 3 has {B * K - 1} draws")


def test_draws_that_are_doubled_are_found(whole: Run):
    rewrite_parquet(whole, layout.draws(2, 1), lambda table: pa.concat_tables([table, table.slice(0, 1)]))
    assert reports(check(whole), layout.draws(2, 1), "is drawn 2 times")


def test_steps_that_are_missing_or_doubled_are_found(whole: Run):
    rewrite_parquet(whole, layout.steps(1, 1), lambda table: table.slice(1))
    rewrite_parquet(whole, layout.steps(4, 2), lambda table: pa.concat_tables([table, table.slice(1)]))
    findings = check(whole)
    assert reports(findings, layout.steps(1, 1), "step 1 is missing")
    assert reports(findings, layout.steps(4, 2), "step 8 is in the ledger 2 times")


def test_a_ledger_under_anothers_name_is_found(whole: Run):
    path_of(whole, layout.steps(2, 1)).write_bytes(whole.store.read(layout.steps(1, 1)))
    describe_again(whole, layout.steps(2, 1))
    assert reports(check(whole), layout.steps(2, 1), "another sync")


@pytest.mark.parametrize(
    ("trajectory", "problem"),
    [
        ("0/77/0", "which no record admits"),
        ("0/0/99", "which no record admits"),
        ("1/6/0", "which no record admits"),
        ("1/5/0", "admitted only after"),
    ],
)
def test_a_draw_of_what_had_not_entered_is_found(whole: Run, trajectory: str, problem: str):
    rewrite_parquet(whole, layout.draws(2, 1), lambda table: with_first(table, "trajectory_id", trajectory))
    assert reports(check(whole), layout.draws(2, 1), problem)


def test_a_draw_for_another_prompt_than_its_trajectory_answers_is_found(whole: Run):
    rewrite_parquet(whole, layout.draws(2, 1), lambda table: with_first(table, "prompt_id", "train/nobody"))
    findings = check(whole)
    assert reports(findings, layout.draws(2, 1), "mixes 2 prompts")
    assert reports(findings, layout.draws(2, 1), "but it answers")


def test_trajectories_of_unknown_prompts_are_found(whole: Run):
    Trajectories(whole).append(0, 40, make_shard({"train/unheard": [1.0]}, round=40))
    assert reports(check(whole), "trajectories", "train/unheard")


def test_an_evaluation_of_a_version_that_never_was_is_found(whole: Run):
    record = json.loads(whole.store.read(layout.evaluation(Version(2, 1))))
    key = layout.evaluation(Version(7, 1))
    whole.store.create(key, with_digest({**record, "version": 7}))
    assert reports(check(whole), key, "neither stored nor given up")


def test_a_manifest_under_anothers_name_is_found(whole: Run):
    for name in ("MANIFEST.json", "model.safetensors", "config.json"):
        data = whole.store.read(f"versions/000002-a0001/{name}")
        path_of(whole, f"versions/000002-a0001/{name}").write_bytes(data)
        copy = path_of(whole, f"versions/000008-a0002/{name}")
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(data)
    assert reports(check(whole), "versions/000008-a0002/", "its manifest says it is 000002-a0001")


def test_an_admitted_shard_that_was_rewritten_whole_is_found(whole: Run):
    """The shard is readable, with the right schema and number of rows. Only its checksum is wrong."""
    key = layout.shard(0, 1)
    table = pq.read_table(io.BytesIO(whole.store.read(key)))
    rewards = pa.array([1.0 - reward for reward in table["reward"].to_pylist()])
    place = table.schema.get_field_index("reward")
    path_of(whole, key).write_bytes(encode(table.set_column(place, "reward", rewards)))
    problems = [it.problem for it in check(whole).problems if it.key == key]
    assert len(problems) == 1
    assert "bytes" in problems[0] or "sha256" in problems[0]


def test_many_problems_of_one_kind_are_counted_not_listed(whole: Run):
    change: dict[str, Any] = {"version_start": Version(55, 1), "version_end": Version(55, 1)}
    for round in range(30, 33):
        rewards = {prompt_id: [0.5] * 10 for prompt_id in PROMPTS}
        Trajectories(whole).append(0, round, make_shard(rewards, round=2, **change))
    problems = [it.problem for it in check(whole).problems]
    assert len(problems) < 30
    assert any("more like this" in problem for problem in problems)


def with_first(table: pa.Table, column: str, value: str) -> pa.Table:
    """Return the table with one value of its first row changed."""
    values = [value, *table[column].to_pylist()[1:]]
    return table.set_column(table.schema.get_field_index(column), column, pa.array(values))


def test_a_record_whose_step_goes_back_is_found(whole: Run):
    rewrite_json(whole, layout.sync(4), step=6)
    assert reports(check(whole), layout.sync(4), "follows step 6, not after step 6")


def test_a_record_that_was_changed_breaks_the_chain_of_hashes(whole: Run):
    rewrite_json(whole, layout.sync(1), created_at="2020-01-01T00:00:00+00:00")
    assert reports(check(whole), layout.sync(2), "hash")
