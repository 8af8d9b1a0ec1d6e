"""A moving reference, as a learner keeps it."""

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_policy
from tba.train.learner import Learner
from tba.types import Outcome
from tests.support.tba.trainers import Buffer, Journal, settings


def steps_of(learner: Learner, n: int) -> list[dict[str, list[float]]]:
    """Return the outcomes of each step, all on the same trajectories."""
    buffer, found = Buffer(Journal()), []
    for step in range(1, n + 1):
        learned = learner.learn(step, learner.collate(buffer.fetch(buffer.draw(step))))
        found.append({name: [getattr(it, name) for it in learned.outcomes] for name in Outcome.__slots__})
    return found


@pytest.mark.parametrize("name", ["trajectory-balance", "tba-prime"])
def test_a_reset_reference_is_the_policy_of_that_moment_until_the_next_reset(name):
    learner = Learner(settings(objective__name=name, objective__reference_reset=2), tiny_policy())
    found = steps_of(learner, 6)
    stored = found[0]["ref_logp"]
    assert found[1]["ref_logp"] == stored != found[0]["logp"]
    for reset in (2, 4):
        assert found[reset]["ref_logp"] == pytest.approx(found[reset]["logp"], rel=1e-6)
        assert found[reset + 1]["ref_logp"] == found[reset]["ref_logp"]
        assert found[reset + 1]["logp"] != pytest.approx(found[reset]["logp"], rel=1e-6)
    assert found[4]["ref_logp"] != found[2]["ref_logp"]


@pytest.mark.parametrize("settings_of", [{"objective__reference_reset": 2}, {"objective__reference_decay": 0.5}])
def test_token_by_token_it_is_the_same_reference(settings_of):
    """If policy and reference are equal, advantages depend only on rewards, and k3 is 0."""
    step = 3 if "objective__reference_reset" in settings_of else 1
    prime = Learner(settings(objective__name="tba-prime", **settings_of), tiny_policy())
    advantages = steps_of(prime, step)[-1]["advantage"]
    assert advantages == pytest.approx([0, 0, -0.5, 0.5, -0.5, 0.5], abs=1e-5)
    buffer, grpo = Buffer(Journal()), Learner(settings(objective__name="grpo", **settings_of), tiny_policy())
    for number in range(1, step + 1):
        metrics = grpo.learn(number, grpo.collate(buffer.fetch(buffer.draw(number)))).metrics
    assert metrics["k3"] == pytest.approx(0, abs=1e-6)


def test_a_following_reference_is_the_decaying_mean_of_the_policies_so_far():
    policy = tiny_policy()
    learner = Learner(settings(objective__reference_decay=0.75), policy)
    expected = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    buffer = Buffer(Journal())
    for step in range(1, 4):
        learner.learn(step, learner.collate(buffer.fetch(buffer.draw(step))))
        for name, parameter in policy.model.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * parameter.detach()
    assert learner.reference is not None
    for name, tensor in learner.reference.tensors().items():
        torch.testing.assert_close(tensor, expected[name])


def test_a_following_reference_begins_as_the_policy():
    found = steps_of(Learner(settings(objective__reference_decay=0.75), tiny_policy()), 1)
    assert found[0]["ref_logp"] == pytest.approx(found[0]["logp"], rel=1e-6)


@pytest.mark.parametrize(("reset_optimizer", "counted"), [(False, 5), (True, 2)])
def test_the_optimizer_forgets_at_a_reset_if_it_is_told_to(reset_optimizer, counted):
    """The optimizer of a value model does so too."""
    changes = {"objective__reference_reset": 3, "objective__reset_optimizer": reset_optimizer}
    learner = Learner(settings(objective__name="ppo", **changes), tiny_policy())
    steps_of(learner, 5)
    state = learner.state(step=5, sync=3)
    assert state.auxiliary
    for found in (state.optimizer, state.auxiliary):
        assert {float(value) for name, value in found.items() if name.endswith(".step")} == {counted}
