"""`search.reference_logps`: runs whose objective does not need the reference do not compute log-probabilities under
it, and everything else works as in other runs."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.step_queries import DRAWS, LEDGER
from benchmarks.harness.tiny_models import tiny_folder
from flows.cli import main
from flows.commands import audit, fork
from flows.commands.compact import compact_run
from flows.pages.markdown import markdown
from flows.pages.report import comparison
from flows.pages.report.page import write
from flows.planning import create
from flows.planning.describe import describe
from flows.roles import wiring
from storage import layout
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.runs.control import change_state
from storage.runs.run import Run
from tba.config import parse
from tba.errors import ConfigError
from tba.models.policy import PolicyScorer
from tba.presets import PRESETS, preset
from tests.support.flows.live_roles import STEPS, broken_off, live, rows, run_all, settings
from tests.support.flows.site import serve
from tests.support.waiting import until

UNKNOWN = "select count(*) > 0, count(ref_logps), count(behaviour_logps) = count(*) from trajectories"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture
def scorers(monkeypatch: pytest.MonkeyPatch) -> list[PolicyScorer]:
    """Return a list of all scorers that roles make from now on."""
    made: list[PolicyScorer] = []
    make = PolicyScorer.__init__

    def recorded(self: PolicyScorer, *arguments: Any, **options: Any) -> None:
        made.append(self)
        make(self, *arguments, **options)

    monkeypatch.setattr(PolicyScorer, "__init__", recorded)
    return made


@pytest.fixture(scope="module")
def finished(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a finished run of Dr. GRPO, whose penalty is `none`. Weight decay moves its policy whatever the rewards
    are."""
    changes = {"objective.name": "dr-grpo", "training.weight_decay": 0.5}
    run = create.start(settings(policy, **changes), str(tmp_path_factory.mktemp("root")), "without")
    run_all(run)
    yield run


def in_step(policy: Path, root: Path, name: str, reference_logps: str) -> Run:
    """Run a searcher and a trainer in step, so that timing has no influence on what is learned. OAPL learns whatever
    the rewards are."""
    changes = {
        "objective.name": "oapl", "search.reference_logps": reference_logps, "training.steps": 6, "sync.lag": 0,
        "sampling.recent_share": 1.0,
    }  # fmt: skip
    run = create.start(settings(policy, **changes), str(root), name)
    ended: list[BaseException] = []
    trainer = threading.Thread(target=lambda: ended.extend(live(run, "trainer", wiring.run_trainer)))
    trainer.start()
    until(lambda: not trainer.is_alive() or run.store.list(layout.VERSIONS), "a version")
    searcher = threading.Thread(target=lambda: live(run, "searcher-000", wiring.run_searcher, 0))
    searcher.start()
    trainer.join()
    change_state(run, desired="stop", why="finished")
    searcher.join()
    assert ended == []
    return run


def test_the_reference_is_neither_loaded_nor_stored_and_weights_are_those_of_a_run_that_computes_it(
    policy: Path, tmp_path: Path, scorers: list[PolicyScorer]
):
    needed = in_step(policy, tmp_path, "needed", "needed")
    assert scorers == []
    always = in_step(policy, tmp_path, "always", "always")
    assert len(scorers) == 1
    assert rows(needed, UNKNOWN) == [(True, 0, True)]
    assert rows(always, "select count(*) = count(ref_logps) from trajectories") == [(True,)]
    learned = "select step, loss, grad_norm, weights_sha256, log_z, residual_abs from steps order by step"
    assert rows(needed, learned) == rows(always, learned)
    assert len({row[3] for row in rows(needed, learned)}) > 1
    of_draws = "select step, slot, position, trajectory_id, advantage, residual, logp from draws order by all"
    assert rows(needed, of_draws) == rows(always, of_draws)
    for run, known in ((needed, False), (always, True)):
        assert rows(run, "select count(ref_logp) > 0 from draws") == [(known,)]
        assert rows(run, "select count(log_ratio_mean) > 0 from steps") == [(known,)]
        assert check(run).problems == []


def test_presets_compute_what_is_needed_and_runs_that_were_stored_without_the_setting_everything(finished: Run):
    plain = parse(finished.config).to_dict()
    assert plain["search"].pop("reference_logps") == "needed"
    assert parse(plain).search.reference_logps == "always" and parse(plain).stores_reference_logps
    assert not parse(finished.config).stores_reference_logps
    assert {preset(name).search.reference_logps for name in PRESETS} == {"needed"}


def test_views_macros_the_report_and_pages_show_unknown(finished: Run, tmp_path: Path):
    assert rows(finished, UNKNOWN) == [(True, 0, True)]
    assert rows(finished, "select count(*) > 0, count(ref_logp), count(advantage) > 0 from draws") == [(True, 0, True)]
    assert rows(finished, "select count(*), count(log_ratio_mean) from steps") == [(STEPS, 0)]
    assert rows(finished, "select sum(responses), max(kl), sum(left_out) > 0 from from_reference()") == [
        (0, None, True)
    ]
    assert rows(finished, "select distinct reference_version from trajectories") == [(0,)]
    assert check(finished).problems == []
    assert "<h2" in write(finished, str(tmp_path / "report.html")).read_text()
    [(trajectory,)] = rows(finished, "select any_value(trajectory_id) from draws")
    with serve(finished) as site:
        for path in ("/", "/steps", f"/step/{STEPS}", "/trajectories", f"/trajectory/{trajectory}"):
            assert site.ask(path)[0] == 200, path
        assert "policy minus reference" not in site.ask(f"/trajectory/{trajectory}")[2]
    copy = broken_off(finished, tmp_path, after_checkpoint=99, keep_records=99)
    assert "<h2" in comparison.write([finished, copy], str(tmp_path / "both.html")).read_text()
    assert str(STEPS) in markdown(finished)
    assert describe(parse(finished.config)).count("which the objective does not need") == 1


def test_a_step_is_audited_and_a_trainer_that_died_takes_the_same_steps(finished: Run, tmp_path: Path):
    for step in (1, STEPS):
        found = audit.audit(finished, step)
        assert found.ok and found.tolerance == 0.0
    again = broken_off(finished, tmp_path, after_checkpoint=2, keep_records=6)
    assert live(again, "trainer", wiring.run_trainer) == []
    assert rows(again, LEDGER) == rows(finished, LEDGER) and rows(again, DRAWS) == rows(finished, DRAWS)
    assert check(again).problems == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective.penalty": "loss"}, r"--set: objective\.penalty=loss: .* without stored .*reference_logps"),
        ({"objective.name": "trajectory-balance"}, r"--set: objective\.name=trajectory-balance: this objective needs"),
        ({"objective.reference_reset": "5"}, r"--set: objective\.reference_reset=5: this objective needs"),
    ],
)
@pytest.mark.parametrize("replay", [True, False])
def test_a_fork_to_an_objective_that_needs_the_reference_is_refused_before_anything_is_made(
    finished: Run, changes: dict[str, str], said: str, replay: bool
):
    before = {entry.key for entry in finished.store.list()}
    with pytest.raises(ConfigError, match=said):
        fork.fork(finished, 4, {**changes, "search.reference_logps": "always"}, name="x", replay=replay)
    assert {entry.key for entry in finished.store.list()} == before


def test_a_fork_to_another_objective_without_the_reference_learns_from_the_same_rows(finished: Run):
    changes = {"objective.name": "rloo", "objective.penalty": "none"}
    run = fork.fork(finished, 4, changes, name="rloo", replay=True)
    assert live(run, "trainer", wiring.run_trainer) == []
    assert rows(run, "select max(step), count(log_ratio_mean) from steps") == [(STEPS, 0)]
    assert check(run).problems == [] and audit.audit(run, STEPS).ok


def test_a_fork_that_stores_them_itself_learns_from_rows_with_and_without_and_cannot_be_forked_to_need_them(
    finished: Run,
):
    changes = {"search.reference_logps": "always", "training.steps": "20", "sync.checkpoint_every": "1"}
    run = fork.fork(finished, STEPS, changes, name="both")
    run_all(run)
    some = "select count(ref_logps) > 0, count(*) > count(ref_logps) from trajectories"
    assert rows(run, some) == [(True, True)]
    mixed = "select count(distinct ref_logps is null) from draws join trajectories using (trajectory_id)"
    assert rows(run, mixed) == [(2,)]
    assert check(run).problems == [] and audit.audit(run, 20).ok
    with pytest.raises(ConfigError, match="without stored trajectories without them"):
        fork.fork(run, 20, {"objective.penalty": "loss", "training.steps": "24"}, name="x")


def test_a_run_that_stores_them_can_be_forked_either_way(policy: Path, tmp_path: Path):
    changes = {"objective.name": "dr-grpo", "training.weight_decay": 0.5, "search.reference_logps": "always"}
    run = create.start(settings(policy, **changes), str(tmp_path), "with")
    run_all(run)
    assert rows(run, "select count(*) = count(ref_logps) from trajectories") == [(True,)]
    penalised = fork.fork(run, 4, {"objective.penalty": "loss"}, name="penalised", replay=True)
    assert live(penalised, "trainer", wiring.run_trainer) == []
    assert rows(penalised, "select count(k3), count(log_ratio_mean) from steps") == [(STEPS - 4, STEPS)]


def test_compaction_keeps_that_they_are_unknown(finished: Run, tmp_path: Path):
    run = broken_off(finished, tmp_path, after_checkpoint=99, keep_records=99)
    change_state(run, desired="stop", why="finished")
    before = rows(run, "select trajectory_id, response_tokens, behaviour_logps, ref_logps from trajectories order by 1")
    compact_run(run)
    assert run.own.list(layout.COMPACTIONS)
    after = rows(run, "select trajectory_id, response_tokens, behaviour_logps, ref_logps from trajectories order by 1")
    assert before == after
    assert check(run).problems == [] and audit.audit(run, STEPS).ok


@pytest.mark.long
def test_imported_rows_are_scored_only_where_a_loss_may_read_it(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    scored: list[int] = []
    score = PolicyScorer.token_logps

    def recorded(self: PolicyScorer, prompts: Any, responses: Any, **options: Any) -> Any:
        scored.append(sum(map(len, responses)))
        return score(self, prompts, responses, **options)

    monkeypatch.setattr(PolicyScorer, "token_logps", recorded)
    changes = {
        "objective.name": "dr-grpo", "training.responses_per_prompt": 4, "training.steps": 4,
        "limits.data_deadline": 2.0, "search.initial_fill": 16,
    }  # fmt: skip
    run = create.start(settings(policy, **changes), str(tmp_path), "taken")
    live(run, "trainer", wiring.run_trainer)  # ends because no searcher generates
    responses = [
        {"prompt_id": it.prompt_id, "response_tokens": [20 + n, 21], "finished": False, "behaviour_logps": [-1.0, -2.0]}
        for it in read_prompts(run, "train")[:4]
        for n in range(4)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in responses))
    assert main(["import", run.url, str(path)]) == 0
    assert scored == []
    assert rows(run, UNKNOWN) == [(True, 0, True)]
    assert rows(run, "select distinct behaviour_logps from trajectories") == [([-1.0, -2.0],)]
    changes = {"objective.name": "rloo", "objective.penalty": "none"}  # needs no log-probabilities of tokens
    rloo = create.start(parse(run.config).replace(changes), str(tmp_path), "rloo")
    live(rloo, "trainer", wiring.run_trainer)
    path.write_text("".join(f"{json.dumps({**row, 'behaviour_logps': None})}\n" for row in responses[:2]))
    assert main(["import", rloo.url, str(path)]) == 0
    assert scored == [2]  # the reference stands for the policy that sampled, which is unknown
    assert rows(rloo, "select count(*), count(ref_logps), max(behaviour_logps[1]) < -1.0 from trajectories") == [
        (2, 0, True)
    ]
    assert check(run).problems == [] and check(rloo).problems == []


def test_drift_leaves_out_draws_that_no_step_computed(finished: Run):
    """Most groups of this run have equal rewards, and so no gradient."""
    [(drawn, computed)] = rows(finished, "select count(*), count(logp) from draws")
    assert 0 < computed < drawn
    query = """
        select count(*), avg(gap), sum(exp(gap)) ** 2 / (count(*) * sum(exp(2 * gap)))
        from (
            select logp - list_sum(behaviour_logps) as gap
            from draws join trajectories using (trajectory_id) where logp is not null
        )
    """
    [expected] = rows(finished, query)
    assert rows(finished, "select draws, drift_mean, effective_share from drift(1000)") == [pytest.approx(expected)]
