"""A task whose environment answers the policy, with whole roles on real storage."""

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from flows.commands import audit
from flows.planning import create, describe, resolve
from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.models.policy import Policy
from tests.support.flows.live_roles import rows, run_all, settings
from tests.support.flows.own_turns import OWN
from tests.support.tba.turn_examples import CHARACTERS


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    Policy(tiny_llama(characters=CHARACTERS), tiny_tokenizer(CHARACTERS), torch.device("cpu")).snapshot().save(folder)
    task = "tests.support.tba.turn_examples:Echo"
    changes = {"task.name": task, "training.steps": 4, "search.top_p": 1.0, "search.temperature": 1.0}
    run = create.start(settings(folder, **changes), str(tmp_path_factory.mktemp("root")), "turns")
    run_all(run)
    return run


def test_responses_of_several_turns_are_stored_learned_from_and_scored(finished: Run):
    kinds = rows(finished, "select loss_mask is null, count(*) > 0 from trajectories group by all order by all")
    assert kinds == [(False, True), (True, True)]
    drawn = "from draws d join trajectories using (trajectory_id) where loss_mask is not null"
    assert rows(finished, f"select count(distinct d.step) {drawn}") == [(4,)]
    assert {version.number for version in Evaluations(finished).done()} >= {0, 2}
    assert check(finished).ok


def test_what_the_environment_wrote_has_no_log_probabilities_and_what_the_policy_wrote_has(finished: Run):
    for column in ("behaviour_logps", "ref_logps"):
        both = f"list_zip({column}, loss_mask)"
        wrong = f"[1 for pair in {both} if (pair[1] = 0) = pair[2]]"
        assert rows(
            finished, f"select sum(len({wrong})), min({OWN}) > 0 from trajectories where loss_mask is not null"
        ) == [(0, True)]


def test_the_first_step_finds_the_log_probabilities_that_were_recorded_at_generation(finished: Run):
    """At step 1 the policy has learned nothing yet. Only the tokens that it wrote are summed."""
    counted = "[:length - finished::int]"
    found = rows(
        finished,
        f"select max(abs(logp - list_sum(behaviour_logps{counted}))), "
        f"max(abs(ref_logp - list_sum(ref_logps{counted}))), count(loss_mask) > 0 "
        "from draws d join trajectories using (trajectory_id) where d.step = 1",
    )
    assert max(found[0][:2]) < 1e-3 and found[0][2]


def test_a_step_counts_the_tokens_of_the_policy_and_no_others(finished: Run):
    own = f"coalesce({OWN}, length) - finished::int"
    [*counted] = rows(
        finished,
        f"select any_value(tokens), sum({own}), sum(length - finished::int) "
        "from draws d join trajectories using (trajectory_id) join steps s on s.step = d.step group by d.step",
    )
    assert len(counted) == 4
    for tokens, own, every in counted:
        assert tokens == own < every


def test_a_step_can_be_taken_again(finished: Run):
    found = audit.audit(finished, 4, tolerance=0.01)
    assert [it for it in (*found.compared, *found.rows) if not it.agrees] == []


def test_the_stored_text_has_the_turns_in_their_order(finished: Run):
    texts = rows(finished, "select distinct response from trajectories where loss_mask is not null")
    assert texts
    for (text,) in texts:
        assert any(text.startswith(f"?{text[:n]}=", n) for n in range(1, len(text))), text


def test_a_dry_run_says_that_what_the_environment_wrote_is_stored_too():
    said = [
        describe.describe(resolve.resolve(task, {"model.path": "m"}))
        for task in ("tests.support.tba.turn_examples:Echo", "gsm8k")
    ]
    assert ["more because the environment's turns are stored too" in it for it in said] == [True, False]
