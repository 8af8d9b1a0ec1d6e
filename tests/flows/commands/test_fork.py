"""Exact resume, audit and forks: a run whose roles are killed, compared with runs that repeat its steps unbroken."""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.harness.step_queries import DRAWS, LEDGER
from benchmarks.harness.tiny_models import tiny_folder
from flows import cli
from flows.commands import audit, fork
from flows.planning import create
from flows.roles import wiring
from flows.roles.repeat_steps import restore_trainer
from storage import layout
from storage.maintenance.check import check
from storage.objects import manifest_folders, parquet
from storage.runs.arithmetic import find_arithmetic
from storage.runs.control import read_state
from storage.runs.forks import register
from storage.runs.retention import give_up
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from tba.errors import ConfigError, Damaged
from tba.types import Version
from tests.support.faults.rewriting import describe_again, rewrite
from tests.support.flows.killed_runs import kill, role, rows, run_with_kills, stored
from tests.support.flows.live_roles import live, settings
from tests.support.storage.synthetic import copy_run

STEPS, EVERY = 24, 2


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run of real processes, whose trainer was killed twice at work, and whose searcher once."""
    return run_with_kills(tmp_path_factory.mktemp("root"), STEPS)


@pytest.fixture(scope="module")
def unbroken(killed: Run) -> Run:
    """Return a fork from step 0 that replays the killed run's records in one life."""
    run = fork.fork(killed, 0, {}, name="unbroken", replay=True)
    assert live(run, "trainer", wiring.run_trainer) == []
    return run


def test_a_killed_and_resumed_run_took_the_steps_of_an_unbroken_one_bit_by_bit(killed: Run, unbroken: Run):
    assert max(attempt for (attempt,) in rows(killed, "select attempt from attempts")) == 3
    assert rows(killed, LEDGER) == rows(unbroken, LEDGER)
    assert rows(killed, DRAWS) == rows(unbroken, DRAWS)
    assert len(rows(killed, LEDGER)) == STEPS
    for run in (killed, unbroken):
        assert check(run).problems == []


def test_an_audit_finds_every_step_as_the_ledger_says(killed: Run, unbroken: Run):
    for run, step in ((killed, 1), (killed, 9), (killed, STEPS), (unbroken, 20)):
        found = audit.audit(run, step)
        assert found.ok and found.tolerance == 0.0
        assert [it.agrees for it in found.compared if it.what.startswith(("loss", "grad_norm", "sha256"))] == [True] * 3
        assert found.began_after < step


def test_settings_that_fit_are_checked_and_stored_as_if_they_were_given(killed: Run):
    fitting = fork.fork(killed, 0, {"seed": 3}, name="fitting", fit=lambda config: {"training.learning_rate": 1e-5})
    assert (fitting.config["seed"], fitting.config["training"]["learning_rate"]) == (3, 1e-5)
    with pytest.raises(ConfigError, match=r"^--set: model\.lora_rank is shared with the parent"):
        fork.fork(killed, 0, {}, name="another", fit=lambda config: {"model.lora_rank": 8})


def altered(run: Run, folder: Path, key: str, change: Callable[[pa.Table], pa.Table]) -> Run:
    """Return a copy of the run in which one object is changed."""
    subprocess.run(["cp", "-r", run.url, str(folder / run.name)], check=True)
    path = folder / run.name / key
    path.write_bytes(parquet.encode(change(parquet.decode(path.read_bytes(), key))))
    altered = Run.open(str(folder / run.name))
    describe_again(altered, key)
    return altered


def put(table: pa.Table, column: str, row: int, value: object) -> pa.Table:
    place = table.column_names.index(column)
    values = table[column].to_pylist()
    values[row] = value
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("loss", 0.125, "loss"),
        ("grad_norm", 1.0, "grad_norm"),
        ("grad_norm", None, "grad_norm"),
        ("reward_mean", 123.0, "reward_mean"),
        ("age_max", 99.0, "age_max"),
        ("tokens", 1.0, "tokens"),
        ("weights_sha256", "0" * 64, "sha256 of the weights after step 2"),
        ("residual", 9.0, "slot 0, position 1: residual"),
        ("residual", None, "slot 0, position 1: residual"),
        ("age", 7, "slot 0, position 1: age"),
        ("trajectory_id", "0/0/0", "slot 0, position 1: trajectory_id"),
    ],
)
def test_an_audit_names_what_differs(killed: Run, tmp_path: Path, column: str, value: object, said: str):
    attempt = rows(killed, "select attempt from steps where step = 1")[0][0]
    is_draw = said.startswith("slot")
    key = layout.draws(1, attempt) if is_draw else layout.steps(1, attempt)
    row = 1 if is_draw or column == "weights_sha256" else 0
    run = altered(killed, tmp_path, key, lambda table: put(table, column, row, value))
    found = audit.audit(run, 1)
    assert not found.ok
    differing = {it.what: it.ledger for it in [*found.compared, *found.rows] if not it.agrees}
    assert differing[said] == value
    assert differing.keys() <= {said, "trajectories drawn"}


def test_an_audit_says_what_the_ledger_lacks(killed: Run, tmp_path: Path):
    attempt = rows(killed, "select attempt from steps where step = 1")[0][0]
    run = altered(killed, tmp_path, layout.steps(1, attempt), lambda table: put(table, "version", 0, 7))
    assert [(it.ledger, it.now) for it in audit.audit(run, 1).compared if not it.agrees] == [
        (f"000007-a{attempt:04d}", f"000000-a{attempt:04d}")
    ]
    run.store.delete(layout.draws(1, attempt))
    with pytest.raises(Damaged, match=r"draws/000001-a\d{4}.parquet"):
        audit.audit(run, 1)


def test_an_audit_that_finds_a_difference_shows_the_row_and_ends_with_1(
    killed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    attempt = rows(killed, "select attempt from steps where step = 1")[0][0]
    run = altered(killed, tmp_path, layout.draws(1, attempt), lambda table: put(table, "residual", 1, 9.0))
    assert cli.main(["audit", run.url, "--step", "1"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"slot 0, position 1: residual\s+9\s+\S+\s+differs", said)
    assert "1 value differs from the ledger" in said


@pytest.mark.parametrize("stored", [True, False])
def test_an_audit_says_if_it_computes_otherwise_than_the_attempt_or_if_it_cannot_know(
    killed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: bool
):
    attempt = rows(killed, "select attempt from steps where step = 1")[0][0]
    now = find_arithmetic(killed, attempt)
    assert now is not None and (now.compute_dtype, now.device) == ("float32", "cpu")
    assert audit.audit(killed, 1).computing == now
    run = copy_run(killed, tmp_path)
    path = Path(run.url, layout.arithmetic(attempt))
    if stored:
        rewrite(path, compute_dtype="bfloat16")
        said = f"values can differ: it computes in {now}; the attempt computed in bfloat16 on cpu"
    else:  # as in older runs
        path.unlink()
        said = f"how attempt {attempt} computed is not stored; the audit computes in {now}"
    assert cli.main(["audit", run.url, "--step", "1"]) == 0
    assert said in capsys.readouterr().out
    assert cli.main(["audit", killed.url, "--step", "1"]) == 0
    assert " computes in " not in capsys.readouterr().out


def test_an_audit_with_a_tolerance_accepts_differences_of_other_hardware(killed: Run, tmp_path: Path):
    attempt, loss = rows(killed, "select attempt, loss from steps where step = 1")[0]
    run = altered(killed, tmp_path, layout.steps(1, attempt), lambda table: put(table, "loss", 0, loss * 1.001))
    assert not audit.audit(run, 1).ok
    assert audit.audit(run, 1, tolerance=0.01).ok
    assert not audit.audit(run, 1, tolerance=0.0001).ok


def test_a_fork_goes_on_from_a_checkpoint_with_searchers_of_its_own(killed: Run):
    run = fork.fork(killed, 18, {"training.learning_rate": "5e-4", "training.steps": "28"}, name="further")
    searcher = role(run, "searcher")
    try:
        assert live(run, "trainer", wiring.run_trainer) == []
    finally:
        kill(searcher)
    assert check(run).problems == check(killed).problems == []
    shared = f"select * from ({LEDGER}) where step <= 18"
    assert rows(run, shared) == rows(killed, shared)
    assert rows(run, "select step, attempt from steps where step > 18 order by step") == [
        (step, 4) for step in range(19, 29)
    ]
    assert rows(run, "select distinct lr from steps where step > 18") != rows(killed, "select distinct lr from steps")
    assert audit.audit(run, 25).ok
    with pytest.raises(ConfigError, match=r"step 9 is one of whole's: `tba audit whole --step 9`"):
        audit.audit(run, 9)


def test_a_checkpoint_that_was_given_up_is_made_again(killed: Run):
    assert Version(6, 2) not in Checkpoints(killed).complete()
    run = fork.fork(killed, 6, {}, name="rebuilt", replay=True)
    assert run.parent and run.parent.rebuilt
    assert check(run).problems == []  # also before the fork has begun
    assert live(run, "trainer", wiring.run_trainer) == []
    assert rows(run, LEDGER) == rows(killed, LEDGER)
    assert check(run).problems == []


def test_a_checkpoint_that_was_given_up_and_is_still_there_is_taken_along(killed: Run, tmp_path: Path):
    parent = copy_run(killed, tmp_path / "runs")
    checkpoint = Checkpoints(parent).complete()[0]
    give_up(parent, checkpoints=[checkpoint], why="a test")  # by a process killed before it removed the checkpoint
    run = fork.fork(parent, checkpoint.number * EVERY, {"training.steps": "28"}, name="copied")
    assert run.parent and run.parent.rebuilt
    manifest_folders.remove(parent.store, layout.checkpoint(checkpoint))
    assert checkpoint in Checkpoints(run).complete()
    assert check(run).problems == []


def test_a_replay_with_another_sampler_and_another_k_needs_no_generation(killed: Run):
    changes = {"sync.every": "3", "sampling.recent_share": "0", "objective.beta_end": "0.3"}
    run = fork.fork(killed, 0, changes, name="ablation", replay=True)
    assert read_state(run).searchers == 0
    assert live(run, "trainer", wiring.run_trainer) == []
    assert rows(run, "select distinct branch from draws") == [("prioritised",)]
    assert rows(run, "select max(sync) from steps") == [(STEPS // 3,)]
    trajectories = "select trajectory_id, reward from trajectories where step is not null and step <= 21 order by 1"
    assert rows(run, trajectories) == rows(killed, trajectories)
    assert stored(replace(run, store=run.own), layout.TRAJECTORIES) == 0
    assert check(run).problems == []


@pytest.mark.parametrize(("objective", "metric"), [("ppo", "value_loss"), ("subtrajectory-balance", "residual_abs")])
def test_a_fork_begins_a_value_model_anew_keeps_it_in_checkpoints_alone_and_is_audited(
    killed: Run, objective: str, metric: str
):
    changes = {"objective.name": objective, "objective.value_learning_rate": "0.01", "sync.checkpoint_every": "2"}
    run = fork.fork(killed, 12, changes, name=objective, replay=True)
    assert live(run, "trainer", wiring.run_trainer) == []
    measured = rows(run, f"select step from steps where {metric} >= 0 and value_grad_norm > 0 order by step")
    assert measured == [(step,) for step in range(13, STEPS + 1)]
    began_after = []
    for step in (13, 22):
        found = audit.audit(run, step)
        assert found.ok and found.tolerance == 0.0
        began_after.append(found.began_after)
    assert began_after == [12, 20]  # the parent's checkpoint, without value model, and its own
    kept = Checkpoints(run).complete()[-1]
    assert (Checkpoints(run).load(kept.number, kept.attempt) / "companion.safetensors").is_file()
    assert not any("companion" in entry.key for entry in run.store.list(layout.VERSIONS))
    assert check(run).problems == []


@pytest.mark.parametrize(
    ("step", "changes", "name", "said"),
    [
        (5, {}, "x", r"--step: .* got 5; near it are steps 4 and 6"),
        (999, {}, "x", r"--step: .* got 999"),
        (6, {"task.rule": "other"}, "x", r"task.rule is shared with the parent"),
        (6, {"search.temperature": "1"}, "x", r"search.temperature is shared with the parent"),
        (6, {"search.prompts_from": "first"}, "x", r"search.prompts_from is shared with the parent"),
        (6, {"search.prompts_where": "tries > 0"}, "x", r"search.prompts_where is shared with the parent"),
        (6, {"start.step": "1"}, "x", r"start.step is set by --step"),
        (6, {"training.steps": "6"}, "x", r"training.steps must be > 6, the step after which the fork starts, got 6"),
        (6, {"sync.lag": "0"}, "x", r"sync.lag can be set in a fork only if the parent sets it too"),
        (
            6,
            {"objective.name": "vine-ppo", "search.value_samples": "9"},
            "x",
            r"objective.name 'vine-ppo' needs values of steps, and whole stored none: its search.value_samples is 0",
        ),
        (6, {"training.optimizer": "adamw-8bit"}, "x", r"training.optimizer is 'adamw' in the parent, .* 'adamw-8bit'"),
        (6, {"training.stepz": "6"}, "x", r"unknown setting 'training.stepz'"),
        (6, {}, "whole", r"run 'whole' exists already"),
        (STEPS, {}, "x", r"training.steps must be > 24, the step after which the fork starts"),
        (6, {}, "not a name", r"run: a name of letters"),
    ],
)
def test_an_impossible_fork_is_refused_before_anything_is_made(
    killed: Run, step: int, changes: dict[str, str], name: str, said: str
):
    before = {entry.key for entry in killed.store.list()}
    with pytest.raises(ConfigError, match=said):
        fork.fork(killed, step, changes, name=name)
    assert {entry.key for entry in killed.store.list()} == before


def test_a_fork_can_be_forked_only_after_its_own_start_and_a_replay_never(killed: Run, unbroken: Run):
    further = fork.fork(killed, 12, {}, name="left-at-12")
    with pytest.raises(ConfigError, match=r"step 6 is one of whole's: `tba fork whole --step 6`"):
        fork.fork(further, 6, {}, name="x")
    with pytest.raises(ConfigError, match=r"unbroken replays what whole recorded: fork whole with its settings"):
        fork.fork(unbroken, 6, {}, name="x")
    with pytest.raises(ConfigError, match=r"whole has recorded 24 steps, and a replay goes no further, got 30"):
        fork.fork(killed, 6, {"training.steps": "30"}, name="x", replay=True)
    with pytest.raises(ConfigError, match=r"search.temperature is shared with the parent"):
        fork.fork(killed, 6, {"search": {"temperature": 2.0}}, name="x")


def test_a_fork_that_was_cut_short_can_be_made_again(killed: Run):
    origin = fork.fork(killed, 12, {}, name="whole-twelve").parent
    assert origin
    register(killed, "again", origin)  # and no more, as if the process was killed then
    assert fork.fork(killed, 12, {}, name="again").parent == origin
    with pytest.raises(ConfigError, match="run 'again' exists already beside 'whole'"):
        fork.fork(killed, 12, {}, name="again")


def test_a_fork_without_the_checkpoint_it_starts_from_says_so_and_publishes_nothing(killed: Run):
    run = fork.fork(killed, 6, {}, name="no-start", replay=True)
    for checkpoint in Checkpoints(replace(run, store=run.own, inherits=None)).complete():
        manifest_folders.remove(run.own, layout.checkpoint(checkpoint))
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, Damaged) and "starts from the checkpoint of sync 3, which is gone" in str(error)
    assert not run.own.list(layout.VERSIONS)
    with pytest.raises(Damaged, match="which is gone"):
        restore_trainer(run, 8)


def test_a_metric_that_was_not_measured_then_is_no_difference(killed: Run, tmp_path: Path):
    attempt = rows(killed, "select attempt from steps where step = 1")[0][0]
    run = altered(killed, tmp_path, layout.steps(1, attempt), lambda table: table.drop_columns(["equal_rewards"]))
    assert audit.audit(run, 1).ok


def test_a_start_policy_that_changed_is_noticed(killed: Run, tmp_path: Path):
    """Version 0 does not hold the full precision here, so the start is loaded again from model.path."""
    policy = tiny_folder(tmp_path / "tiny")
    config = settings(policy, **{"model.publish_dtype": "bfloat16"})
    run = create.start(config, str(tmp_path), "bf16")
    searcher = role(run, "searcher")
    try:
        assert live(run, "trainer", wiring.run_trainer) == []
    finally:
        kill(searcher)
    assert audit.audit(run, 1).ok
    for checkpoint in Checkpoints(run).complete():
        give_up(run, checkpoints=[checkpoint], why="a test")
    tiny_folder(policy, seed=1)
    with pytest.raises(ConfigError, match=r"model.path: the model there has changed since version"):
        audit.audit(run, 1)


def test_the_commands_say_what_they_did(killed: Run, unbroken: Run, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["audit", killed.url, "--step", "3"]) == 0
    assert "the step matches the ledger: 32 rows" in capsys.readouterr().out
    assert cli.main(["audit", killed.url, "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert cli.main(["audit", killed.url, "--step", "0"]) == 2
    assert "--step: must be between 1 and 24, got 0" in capsys.readouterr().err
    assert cli.main(["fork", killed.url, "--step", "12", "--no-start", "--set", "sampling.recent_share=0.9"]) == 0
    made = Run.open(capsys.readouterr().out.strip())
    assert (made.name, made.config["sampling"]["recent_share"]) == ("whole-12", 0.9)
    cli.main(["runs", made.root, "--json"])
    told = {it["run"]: (it["parent"], it["state"]) for it in json.loads(capsys.readouterr().out)}
    assert told["whole-12"] == ("whole@12", "new")
    assert told[unbroken.name] == ("whole@0 replayed", "interrupted")  # nobody has scored its last version
    assert fork.default_name(killed, 12) == "whole-12-2"


def test_a_damaged_past_is_not_retaken(killed: Run, tmp_path: Path):
    attempt = rows(killed, "select attempt from steps where step = 6")[0][0]
    run = altered(killed, tmp_path, layout.steps(3, attempt), lambda table: put(table, "weights_sha256", 1, "0" * 64))
    with pytest.raises(Damaged, match=r"after repeating the steps up to 6, the weights have sha256"):
        fork.fork(run, 6, {}, name="wrong")
    assert not run.store.exists(layout.fork("wrong"))
