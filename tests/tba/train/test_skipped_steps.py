"""Steps that are not finite: a trainer skips them and updates nothing."""

import math

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_policy
from tba.errors import RunFailed, Stopped
from tba.objectives.policy_gradients.ppo import PPO
from tba.train.learner import Learner
from tests.support.tba.trainers import EVERY, RESPONSES, STEPS, Buffer, Journal, LeaseAt, make, settings


@pytest.mark.parametrize(
    ("bad", "changes"),
    [(math.nan, {}), (math.inf, {}), (-math.inf, {}), (math.nan, {"objective__reference_decay": 0.9})],
)
def test_a_step_that_is_not_finite_is_skipped_as_if_it_had_not_been(tmp_path, bad, changes):
    """Optimizer and moving reference are unchanged too: at a constant learning rate, the other steps are the same as
    without the skipped step."""
    trainer, store = make(tmp_path, settings(**changes), rewards={2: bad})
    trainer.run()
    without, buffer = Learner(settings(**changes), tiny_policy()), Buffer(Journal())
    for step in (1, *range(3, STEPS + 1)):
        without.learn(step, without.collate(buffer.fetch(buffer.draw(step))))
    assert trainer.learner.snapshot().sha256 == without.snapshot().sha256
    first, second, third, *_ = store.records
    assert second.metrics["skipped"] == 1 and not {"loss", "grad_norm", "reward_mean"} & set(second.metrics)
    assert "skipped" not in first.metrics and "skipped" not in third.metrics
    assert all(math.isfinite(value) for record in store.records for value in record.metrics.values())
    for outcome in second.outcomes[:RESPONSES]:
        assert outcome.advantage is None and outcome.logp is not None
    assert trainer.events.kinds == ["step-skipped"]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("broken", ["loss", "grad_norm", "value_grad_norm"])
def test_one_number_that_is_not_finite_keeps_policy_value_model_and_moments_where_they_are(broken):
    """The other numbers may be finite; they are still reported."""
    learner, buffer = Learner(settings(objective__name="ppo"), tiny_policy()), Buffer(Journal())
    batch, objective = learner.collate(buffer.fetch(buffer.draw(1))), learner.objective
    learner.learn(1, batch)
    assert learner.auxiliary
    before, sha256 = learner.state(step=1, sync=1), learner.snapshot().sha256
    if broken == "loss":

        class Infinite(PPO):
            def loss(self, groups, *, beta):
                loss = super().loss(groups, beta=beta)
                return loss._replace(value=loss.value + math.inf)

        learner.objective = Infinite(**vars(objective))
    else:
        of = learner.policy.model if broken == "grad_norm" else learner.auxiliary.model
        next(of.parameters()).register_hook(lambda grad: grad * math.inf)
    metrics = learner.learn(2, batch).metrics
    told = {"loss", "grad_norm", "value_grad_norm"} & set(metrics)
    assert metrics["skipped"] == 1 and told == {"loss", "grad_norm", "value_grad_norm"} - {broken}
    after = learner.state(step=2, sync=1)
    assert learner.snapshot().sha256 == sha256 and before.auxiliary and after.auxiliary
    for kept, now in ((before.optimizer, after.optimizer), (before.auxiliary, after.auxiliary)):
        assert kept.keys() == now.keys() and all(torch.equal(now[name], it) for name, it in kept.items())


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_run_and_update_nothing(tmp_path):
    policy = tiny_policy()
    rewards = {1: math.nan, 3: math.nan, 4: math.nan}
    trainer, _ = make(tmp_path, settings(limits__skipped_steps=1), policy=policy, rewards=rewards)
    with pytest.raises(RunFailed, match=r"step 4: .* than 1 steps in a row \(limits.skipped_steps\)"):
        trainer.run()
    (tmp_path / "other").mkdir()
    trainer, _ = make(tmp_path / "other", settings(limits__skipped_steps=0), policy=policy, rewards={1: math.nan})
    before = policy.snapshot().sha256
    with pytest.raises(RunFailed, match="step 1: loss nan with gradient norm nan; no weight was updated"):
        trainer.run()
    assert policy.snapshot().sha256 == before


@pytest.mark.parametrize(
    ("changes", "first"),
    [({}, 1), ({"objective__reference_reset": EVERY, "objective__reset_optimizer": True}, EVERY + 1)],
)
def test_a_checkpoint_after_nothing_but_skipped_steps_goes_on_bit_for_bit(tmp_path, changes, first):
    """The optimizer in this checkpoint has no state."""
    config = settings(sync__checkpoint_every=1, **changes)
    rewards, last = dict.fromkeys(range(first, first + EVERY), math.nan), (first + EVERY - 1) // EVERY
    whole, expected = make(tmp_path, config, rewards=rewards)
    whole.run()
    for name in ("half", "rest"):
        (tmp_path / name).mkdir()
    lease = LeaseAt(Stopped("enough"), last * EVERY - 1)
    half, store = make(tmp_path / "half", config, rewards=rewards, lease=lease)
    with pytest.raises(Stopped):
        half.run()
    assert max(store.states) == last and not store.states[last].optimizer
    rest, found = make(tmp_path / "rest", config, policy=half.learner.policy, rewards=rewards)
    rest.resume(store.states[last])
    rest.run()
    assert found.digests[STEPS // EVERY] == expected.digests[STEPS // EVERY]
