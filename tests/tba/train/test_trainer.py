"""What a trainer does with weights and storage, on a tiny policy and a buffer with fixed groups."""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a response.

import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import fakes
from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import tiny_folder, tiny_llama, tiny_policy, tiny_tokenizer, trajectory
from tba.config import Config
from tba.errors import DeadlinePassed, RunFailed, Stopped, StorageError, Superseded
from tba.fetched import Fetched
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy, PolicyScorer, Snapshot
from tba.objectives import OBJECTIVES
from tba.objectives.ppo import PPO
from tba.train.learner import Learner
from tba.train.schedules import beta_at, learning_rate_at, reference_power_at
from tba.train.stop_time import CHECKPOINT, RECENT_STEPS, StoreTimes, steps_to_stop
from tba.train.trainer import Trainer
from tba.types import Draw, Prompt, Trajectory, Version
from tests.support.tba.trainers import EVERY, PROMPTS, RESPONSES, STEPS, Buffer, Journal, LeaseAt, Store, make, settings

# --- The gradient step, against the formulas ---


def plain_logp(model: torch.nn.Module, rows: Sequence[Trajectory], *, include_eos: bool, temperature: float) -> Tensor:
    """[B] log-probabilities of responses, computed row by row from all logits."""
    logps = []
    for row in rows:
        counted = row.response_tokens if include_eos else row.response_tokens[:-1]
        tokens_T = torch.tensor([*row.prompt_tokens, *counted])
        logps_TV = torch.log_softmax(model(tokens_T[None]).logits[0] / temperature, dim=-1)
        places = range(len(row.prompt_tokens), len(tokens_T))
        logps.append(torch.stack([logps_TV[t - 1, tokens_T[t]] for t in places]).sum())
    return torch.stack(logps)


def plain_loss(
    model: torch.nn.Module, config: Config, rows: Sequence[Trajectory], *, beta: float, power: float
) -> Tensor:
    """The population variance of log pi - power x log pi_ref - r / beta within each group, averaged over groups."""
    counted = [t.length if config.objective.include_eos else t.length - 1 for t in rows]
    logp_B = plain_logp(model, rows, include_eos=config.objective.include_eos, temperature=config.search.temperature)
    reward_B = torch.tensor([t.reward for t in rows], dtype=torch.float64)
    ref_B = torch.tensor([sum(t.ref_logps[:n]) for t, n in zip(rows, counted, strict=True)], dtype=torch.float64)
    return (logp_B - power * ref_B - reward_B / beta).view(-1, RESPONSES).var(dim=1, unbiased=False).mean()


def adamw_by_hand(config: Config, rewards: Mapping[int, float]) -> tuple[torch.nn.Module, list[dict[str, float]]]:
    """Compute the whole run by hand, from the equations of AdamW."""
    training, model = config.training, tiny_llama().double()
    parameters = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    found = []
    for step in range(1, training.steps + 1):
        beta, rate = beta_at(step, config.objective), learning_rate_at(step, training)
        power = reference_power_at(step, config.objective)
        buffer = Buffer(Journal(), rewards)
        loss = plain_loss(model, config, buffer.trajectories(buffer.draw(step)), beta=beta, power=power)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        scale = min(1.0, training.clip_norm / norm) if training.clip_norm else 1.0
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.mul_(training.adam_beta1).add_((1 - training.adam_beta1) * scale * g)
                v.mul_(training.adam_beta2).add_((1 - training.adam_beta2) * (scale * g).square())
                mean, square = m / (1 - training.adam_beta1**step), v / (1 - training.adam_beta2**step)
                p.sub_(rate * training.weight_decay * p).sub_(rate * mean / (square.sqrt() + training.adam_eps))
        found.append(
            {"loss": float(loss.detach()), "grad_norm": norm, "beta": beta, "lr": rate, "reference_power": power}
        )
    return model, found


@pytest.mark.parametrize(
    ("groups", "include_eos", "clip"), [(1, True, 0.0), (2, True, 0.0), (3, True, 0.0), (2, False, 0.0), (2, True, 3.0)]
)
def test_steps_are_adamw_on_trajectory_balance_however_the_batch_is_cut(tmp_path, groups, include_eos, clip):
    config = settings(
        training__steps=4,
        training__groups_per_micro_batch=groups,
        training__learning_rate=3e-3,
        training__schedule="linear",
        training__warmup_steps=2,
        training__stable_steps=None,
        training__decay_steps=0,
        training__adam_beta1=0.8,
        training__adam_beta2=0.95,
        training__adam_eps=1e-6,
        training__weight_decay=0.1,
        training__clip_norm=clip,
        objective__beta_start=0.5,
        objective__beta_end=0.1,
        objective__beta_target=4,
        objective__beta_stop=3,
        objective__target_temperature_start=2.0,
        objective__target_temperature_steps=2,
        objective__reference_temperature_end=1.2,
        objective__reference_temperature_steps=3,
        objective__include_eos=include_eos,
        search__temperature=0.7,
    )
    rewards = {1: 1.0, 2: 0.0, 3: 0.5, 4: 1.0}
    policy = Policy(tiny_llama().double(), tiny_tokenizer(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    trainer, store = make(tmp_path, config, policy=policy, rewards=rewards)
    trainer.syncs.publish = lambda snapshot, sync: None  # float64 is no dtype to publish
    trainer.run()
    expected, found = adamw_by_hand(config, rewards)
    for (name, actual), wanted in zip(policy.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for record, wanted in zip(store.records, found, strict=True):
        assert {name: record.metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


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


@pytest.mark.parametrize("objective", ["trajectory-balance", "ppo"])
def test_a_record_says_whether_a_gradient_was_clipped(tmp_path, objective):
    """It says so for the value model too, and says nothing for a skipped step."""
    steps = {}
    for name, norm in (("free", 0.0), ("plain", 1e9), ("clipped", 1e-6)):
        (tmp_path / name).mkdir()
        config = settings(objective__name=objective, training__clip_norm=norm, training__steps=4)
        trainer, store = make(tmp_path / name, config, rewards={1: 0.5, 3: math.nan})
        trainer.run()
        steps[name] = [{key: it for key, it in step.metrics.items() if "clipped" in key} for step in store.records]
    names = ["clipped", *(["value_clipped"] if objective == "ppo" else [])]
    assert steps["free"] == [{}] * 4
    for kind, value in (("plain", 0.0), ("clipped", 1.0)):
        of_it = dict.fromkeys(names, value)
        assert steps[kind] == [of_it, of_it, {}, of_it]


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


def test_a_trainer_tells_once_that_rewards_have_collapsed_and_once_that_they_came_back(tmp_path):
    config = settings(alarms__window=2, alarms__equal_rewards=0.0)
    trainer, _ = make(tmp_path, config, rewards=dict.fromkeys(range(4, 7), -8.0))
    trainer.run()
    assert isinstance(trainer.events, fakes.Events)
    assert trainer.events.written == [("reward-collapsed", "warning"), ("reward-collapsed", "info")]


def test_what_a_step_found_is_in_its_record(tmp_path):
    trainer, store = make(tmp_path, settings(), rewards={1: 1.0, 2: 0.0})
    trainer.run()
    assert [record.step for record in store.records] == list(range(1, STEPS + 1))
    assert [record.sync for record in store.records] == [(step + 1) // 2 for step in range(1, STEPS + 1)]
    assert [record.version.number for record in store.records[:5]] == [0, 0, 1, 1, 2]
    for record in store.records:
        residuals = [o.residual for o in record.outcomes]
        assert [(o.slot, o.position) for o in record.outcomes] == [(d.slot, d.position) for d in record.draws]
        assert record.metrics["loss"] == pytest.approx(sum(r * r for r in residuals) / len(residuals), rel=1e-5)
        assert record.metrics["residual_abs"] == pytest.approx(sum(map(abs, residuals)) / len(residuals), rel=1e-5)
        ratios = [o.logp - o.ref_logp for o in record.outcomes]
        assert record.metrics["log_ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4, abs=1e-5)
        log_z = sum(o.log_z for o in record.outcomes) / len(record.outcomes)
        assert record.metrics["log_z"] == pytest.approx(log_z, rel=1e-5)
    assert [record.metrics["equal_rewards"] for record in store.records[:2]] == pytest.approx([1 / 3, 0.0])
    assert store.written == [dict(record.metrics) for record in store.records]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_with_any_objective_a_step_is_the_same_however_the_batch_is_cut(tmp_path, name):
    """The batch has responses of several lengths, and ratios that are not 1."""
    weights, stores = [], []
    for groups in (1, 3):
        config = settings(objective__name=name, training__steps=2, training__groups_per_micro_batch=groups)
        policy = Policy(tiny_llama().double(), tiny_tokenizer(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        trainer, store = make(tmp_path, config, policy=policy)
        trainer.syncs.publish = lambda snapshot, sync: None  # float64 is no dtype to publish
        trainer.run()
        weights.append([p.detach().clone() for p in policy.model.parameters()])
        stores.append(store)
    before = [p.double() for p in tiny_llama().parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(weights[0], before, strict=True))
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    for one, other in zip(*(store.records for store in stores), strict=True):
        measured = {name for name in one.metrics if not name.startswith("seconds")}
        assert measured >= {"loss", "grad_norm", "log_ratio_mean", "equal_rewards"}
        for name in measured:
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-5, abs=1e-9)
        for ours, theirs in zip(one.outcomes, other.outcomes, strict=True):
            assert ours.advantage == pytest.approx(theirs.advantage, rel=1e-5, abs=1e-9)
            assert (ours.residual is None) == (theirs.residual is None) == (ours.log_z is None)


# --- Syncs: what is stored, and in which order ---


def test_every_sync_is_a_record_then_its_ledger_then_its_version_and_checkpoint(tmp_path):
    trainer, store = make(tmp_path, settings(), pause=0.02)
    trainer.run()
    journal = store.journal
    assert journal[0] == "version 0" and journal[1] == "record 0"
    for sync in range(1, 7):
        assert journal.index(f"record {sync}") < journal.index(f"ledger {sync}")
        for later in (f"version {sync}", f"checkpoint {sync}"):
            assert later not in journal or journal.index(f"ledger {sync}") < journal.index(later)
    assert [entry for entry in journal if entry.startswith("checkpoint")] == ["checkpoint 3", "checkpoint 6"]
    assert {0, 1, 3, 6} <= set(store.published())
    assert journal.count("prune checkpoints") == 2 and "prune versions" in journal
    assert {"version 6", "checkpoint 6"} < set(journal[: len(journal) - journal[::-1].index("prune versions")])


def test_versions_are_stored_as_told_and_checkpoints_in_full_precision(tmp_path):
    trainer, store = make(tmp_path, settings(model__publish_dtype="bfloat16"))
    trainer.run()
    for number in (0, 6):
        assert {weights.dtype for weights in store.weights[number].values()} == {torch.bfloat16}
    assert store.dtypes["checkpoint 3"] == store.dtypes["checkpoint 6"] == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_says_which_share_of_its_weights_is_not_that_of_the_version_published_before(tmp_path, dtype):
    """This is so even if numbers of versions in between were skipped."""
    config = settings(model__publish_dtype=dtype, sync__checkpoint_every=2)
    trainer, store = make(tmp_path, config, slow={"version": 0.05})
    trainer.run()
    published = sorted(store.weights)
    assert {0, 2, 4, 6} <= set(published)
    assert store.changed.pop(0) is None
    for before, after in pairwise(published):
        old, new = (torch.cat([it.flatten() for it in store.weights[n].values()]) for n in (before, after))
        assert store.changed[after] == int((old != new).sum()) / len(new) > 0


@pytest.mark.parametrize(
    ("whole", "bases"),
    [
        ((), {0: None, 1: 0, 2: 0, 3: None, 4: 3, 5: 3, 6: None}),
        ((1, 5), {0: None, 1: 0, 2: 1, 3: None, 4: 3, 5: 3, 6: None}),
    ],
)
def test_versions_may_be_stored_as_differences_from_the_last_that_is_stored_whole(tmp_path, whole, bases):
    config = settings(sync__whole_every=3, sync__checkpoint_every=1)
    trainer, store = make(tmp_path, config, whole=whole)
    trainer.run()
    assert store.bases == bases
    assert len(list(tmp_path.iterdir())) == 1, "the last, which is its own base"


def test_a_resumed_trainers_first_version_is_compared_with_none(tmp_path):
    half, store = make(tmp_path, settings(), lease=LeaseAt(Stopped("enough"), 5))
    with pytest.raises(Stopped):
        half.run()
    rest, after = make(tmp_path, settings(), policy=half.learner.policy)
    rest.resume(store.states[3])
    rest.run()
    first, *later = sorted(after.changed)
    assert first == 3 and after.changed[first] is None
    assert later and all(after.changed[number] for number in later)


def test_ledger_and_checkpoint_are_of_the_moment_of_their_sync_though_training_went_on(tmp_path):
    """A slow store gets weights, moments and queues as they were at the sync."""
    trainer, store = make(tmp_path, settings(), slow={"ledger": 0.03})
    trainer.run()
    short, expected = make(tmp_path, settings(training__steps=6))
    short.run()
    assert store.digests[3] == expected.digests[3]
    late, wanted = store.states[3], expected.states[3]
    assert (late.step, late.sync, late.queues) == (6, 3, {"after": 1})
    assert late.optimizer.keys() == wanted.optimizer.keys()
    assert all(torch.equal(late.optimizer[name], wanted.optimizer[name]) for name in late.optimizer)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="a reference that stays"),
        pytest.param({"objective__reference_reset": 4}, id="one that was reset"),
        pytest.param({"objective__reference_reset": 3, "objective__reset_optimizer": True}, id="the optimizer too"),
        pytest.param({"objective__reference_decay": 0.9}, id="one that follows"),
        pytest.param({"objective__name": "ppo"}, id="a value model"),
        pytest.param({"objective__log_z": "learned", "objective__log_z_learning_rate": 0.1}, id="a learned log Z"),
    ],
)
def test_a_resumed_trainer_takes_the_steps_of_an_unbroken_one(tmp_path, changes):
    config = settings(**changes)
    whole, expected = make(tmp_path, config)
    whole.run()
    half, store = make(tmp_path, config, lease=LeaseAt(Stopped("enough"), 5))
    with pytest.raises(Stopped):
        half.run()
    rest, after = make(tmp_path, config, policy=half.learner.policy)
    rest.resume(store.states[3])
    rest.run()
    assert [record.step for record in after.records] == list(range(7, STEPS + 1))
    assert after.digests[6] == expected.digests[6]
    kept, wanted = (store.states[6].auxiliary or {} for store in (after, expected))
    assert bool(wanted) == (whole.learner.auxiliary is not None)
    assert kept.keys() == wanted.keys() and all(torch.equal(kept[name], it) for name, it in wanted.items())
    assert after.journal[:5] == [*(f"record {sync}" for sync in range(4)), "version 3"]


def test_synchronous_training_publishes_a_version_before_the_record_that_waits_for_it(tmp_path):
    config = settings(sync__lag=0, sync__every=1, training__steps=4, search__prompts_per_round=PROMPTS)
    trainer, store = make(tmp_path, config)
    trainer.ahead.buffer.missing = {1, 2, 3, 4}  # pyright: ignore[reportAttributeAccessIssue]

    def publish(version: Version, **_: Any) -> None:
        store.journal.append(f"version {version.number}")
        trainer.ahead.buffer.missing.discard(version.number)  # pyright: ignore[reportAttributeAccessIssue]

    trainer.syncs.versions.publish = publish
    trainer.run()
    for sync in range(1, 5):
        version, record, ledger = (store.journal.index(f"{it} {sync}") for it in ("version", "record", "ledger"))
        assert version < record < ledger


def test_a_step_that_fails_while_a_round_is_awaited_ends_the_trainer(tmp_path):
    config = settings(sync__lag=0, sync__every=1, search__prompts_per_round=PROMPTS, limits__skipped_steps=0)
    trainer, store = make(tmp_path, config, rewards={1: math.nan})
    trainer.ahead.buffer.missing = {1}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RunFailed, match="step 1: loss nan"):
        trainer.run()  # its deadline for the round is longer than that of a test
    assert "record 1" not in store.journal


def test_a_version_that_cannot_be_stored_is_noticed_by_who_waits_for_its_round(tmp_path):
    config = settings(sync__lag=0, sync__every=1, search__prompts_per_round=PROMPTS)
    trainer, _ = make(tmp_path, config)
    trainer.ahead.buffer.missing = {1}  # pyright: ignore[reportAttributeAccessIssue]

    def publish(version: Version, **_: Any) -> None:
        if version.number:
            raise StorageError(f"version {version.number} is lost")

    trainer.syncs.versions.publish = publish
    with pytest.raises(StorageError, match="version 1 is lost"):
        trainer.run()


def test_a_round_that_does_not_arrive_is_waited_for_until_its_deadline(tmp_path):
    config = settings(sync__lag=1, limits__data_deadline=0.3, search__prompts_per_round=PROMPTS * EVERY)
    trainer, store = make(tmp_path, config)
    trainer.ahead.buffer.missing = {2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match=r"round 2 of some searcher has not arrived after 0\.3 s"):
        trainer.run()
    assert "ledger 1" in store.journal and "ledger 2" not in store.journal


def test_where_ages_are_bounded_each_record_but_the_last_waits_for_younger_responses_and_every_version_is_there(
    tmp_path,
):
    """Each record waits for responses of the version before it. Publishing that version takes longer than the steps."""
    config = settings(sampling__max_age=2 * EVERY - 1, sync__checkpoint_every=100, limits__data_deadline=9)
    trainer, store = make(tmp_path, config, slow={"version": 0.2})
    buffer, publish = trainer.ahead.buffer, trainer.syncs.versions.publish
    buffer.missing = set(range(2, config.last_sync + 1))  # pyright: ignore[reportAttributeAccessIssue]

    def published(version: Version, **known: Any) -> None:
        publish(version, **known)
        buffer.missing -= {version.number + 1} - {config.last_sync}  # pyright: ignore[reportAttributeAccessIssue]

    trainer.syncs.versions.publish = published
    trainer.run()
    for sync in range(2, config.last_sync):
        assert store.journal.index(f"version {sync - 1}") < store.journal.index(f"record {sync}")


def test_younger_responses_that_do_not_arrive_are_waited_for_until_the_deadline(tmp_path):
    config = settings(sampling__max_age=2 * EVERY, limits__data_deadline=0.3)
    trainer, store = make(tmp_path, config)
    trainer.ahead.buffer.missing = {2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match=rf"fewer than 6 responses .* {2 * EVERY} steps old \(sampling.max_age\)"):
        trainer.run()
    assert "ledger 1" in store.journal and "ledger 2" not in store.journal


# --- Trouble ---


def test_a_ledger_that_cannot_be_written_ends_the_run_before_any_later_sync(tmp_path):
    trainer, store = make(
        tmp_path, settings(), slow={"ledger": 0.1}, broken={"ledger 2": StorageError("ledger 2 is lost")}
    )
    with pytest.raises(StorageError, match="ledger 2 is lost"):
        trainer.run()
    stored = [entry for entry in store.journal if entry.startswith(("ledger", "version", "checkpoint"))]
    assert stored == ["version 0", "ledger 1", "version 1"]


@pytest.mark.parametrize("entry", ["ledger 1", "version 1", "checkpoint 1"])
def test_trouble_beside_the_steps_is_noticed_at_the_next_step_not_at_the_next_sync(tmp_path, entry):
    config = settings(training__steps=90, sync__every=30, sync__checkpoint_every=1)
    trainer, store = make(tmp_path, config, broken={entry: StorageError("gone")})
    trainer.syncs.versions.publish = lambda version, **_: store.take("version", version.number)
    with pytest.raises(StorageError, match="gone"):
        trainer.run()
    assert 30 <= len(store.written) < 55  # the next sync would notice only at 59


def test_a_checkpoint_that_fails_is_not_followed_by_another(tmp_path):
    trainer, store = make(tmp_path, settings(sync__checkpoint_every=1), broken={"checkpoint 2": StorageError("full")})
    with pytest.raises(StorageError, match="full"):
        trainer.run()
    assert [entry for entry in store.journal if entry.startswith("checkpoint")] == ["checkpoint 1"]


def test_a_record_that_cannot_be_written_is_crossed_by_no_step(tmp_path):
    trainer, store = make(tmp_path, settings())
    trainer.ahead.buffer.broken = {2: StorageError("record 2 is lost")}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StorageError, match="record 2 is lost"):
        trainer.run()
    assert len(store.written) == 4 and "ledger 2" not in store.journal


def test_syncs_that_were_closed_are_stored_though_a_later_step_fails(tmp_path):
    trainer, store = make(tmp_path, settings(limits__skipped_steps=0), slow={"ledger": 0.1}, rewards={5: math.nan})
    with pytest.raises(RunFailed, match="step 5"):
        trainer.run()
    assert {"ledger 1", "ledger 2"} <= set(store.journal) and "ledger 3" not in store.journal


def test_a_superseded_trainer_writes_and_removes_nothing_more(tmp_path):
    lease = LeaseAt(Superseded("another has taken over"), 5)
    trainer, store = make(tmp_path, settings(), lease=lease, gates={"ledger 1": lease.said})
    with pytest.raises(Superseded):
        trainer.run()
    stored = [entry for entry in store.journal if not entry.startswith("record")]
    assert stored == ["version 0", "ledger 1"]  # this ledger was being written


def test_a_trainer_that_is_asked_to_stop_ends_at_the_next_sync_with_version_and_checkpoint(tmp_path):
    trainer, store = make(tmp_path, settings(), lease=LeaseAt(Stopped("enough"), 6))
    with pytest.raises(Stopped):
        trainer.run()
    assert len(store.records) == 8
    assert {"ledger 4", "version 4", "checkpoint 4"} <= set(store.journal)


@pytest.mark.parametrize(("step", "stopping", "left"), [
    (0, False, 2), (1, False, 3), (2, False, 2), (3, False, 3), (9, False, 1), (10, False, 0),
    (1, True, 1), (2, True, 2), (10, True, 0),
])  # fmt: skip
def test_a_stop_takes_the_steps_until_a_sync_that_is_not_the_next_one_if_it_is_heard_only_after_that(
    step: int, stopping: bool, left: int
):
    config = settings(training__steps=10, sync__every=2)
    assert steps_to_stop(config, step, is_stopping=stopping) == left


class Listening(LeaseAt):
    """Records the progress that the trainer tells."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.told: list[str] = []
        self.progress: list[dict[str, float]] = []

    def tell(self, status: str, **progress: float) -> None:
        super().tell(status, **progress)
        self.told.append(status)
        self.progress.append(progress)


def test_a_trainer_tells_how_long_it_would_take_to_stop_by_its_longest_step_and_what_its_syncs_store(tmp_path):
    lease = Listening(Stopped("enough"), 6)
    trainer, _ = make(tmp_path, settings(), lease=lease)
    with pytest.raises(Stopped):
        trainer.run()
    steps = [it for it in lease.progress if "seconds_step" in it]
    assert all(it["seconds_to_stop"] >= round(it["seconds_step"], 1) for it in steps[:-1])
    assert lease.told[-1] == "stopping: stores the sync after step 8"
    assert "seconds_to_stop" in lease.progress[-1]
    trainer.step_times.add(100.0)
    trainer.syncs.times.ledger.add(3.0)
    trainer.syncs.times.version.add(20.0)
    trainer.syncs.times.checkpoint.add(50.0)
    trainer.stopping = None
    assert trainer.seconds_to_stop(2) == pytest.approx(2 * 100 + 73, abs=0.1)
    for _ in range(RECENT_STEPS):
        trainer.step_times.add(1.0)
    assert trainer.seconds_to_stop(2) == pytest.approx(2 * 1 + 73, abs=0.1), "a long step is not long remembered"


def test_before_a_checkpoint_was_measured_it_counts_as_some_versions():
    times = StoreTimes()
    assert times.seconds == 0
    times.version.add(5.0)
    assert times.seconds == 5 + CHECKPOINT * 5
    times.checkpoint.add(7.0)
    assert times.seconds == 12


def test_the_initial_fill_is_waited_for_until_its_deadline(tmp_path):
    trainer, store = make(tmp_path, settings(limits__data_deadline=0.01))
    trainer.ahead.buffer.arrived = 5  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match="5 of 6 trajectories"):
        trainer.run()
    assert store.journal == ["version 0"]


# --- A slow store ---


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the copies of the weights."""
    taken: list[weakref.ref[Snapshot]] = []
    snapshot = Policy.snapshot

    def counted(policy: Policy) -> Snapshot:
        taken.append(weakref.ref(copy := snapshot(policy)))
        return copy

    monkeypatch.setattr(Policy, "snapshot", counted)
    return lambda: sum(copy() is not None for copy in taken)


def run_counting(trainer: Trainer, store: Store, alive: Callable[[], int], *, pause: float) -> int:
    """Run the trainer, and return the greatest number of copies of the weights at the end of a step."""
    counts: list[int] = []

    def write(metrics: dict[str, float], *, step: int) -> None:
        time.sleep(pause)
        counts.append(alive())
        store.written.append(metrics)

    trainer.metrics.write = write
    trainer.syncs.versions.publish = lambda version, **_: store.take("version", version.number)
    trainer.run()
    return max(counts)


def test_where_publishing_is_slow_numbers_are_skipped_and_no_step_waits(tmp_path, alive):
    config = settings(training__steps=60, sync__checkpoint_every=15)
    trainer, store = make(tmp_path, config, slow={"version": 0.5})
    told: list[float] = []

    def tell(status: str, **progress: float) -> None:
        told.append(progress.get("version", -1))
        assert told[-1] in [-1, *store.published()], "the lease tells of a version that nobody can load"

    trainer.lease.tell = tell
    assert run_counting(trainer, store, alive, pause=0.02) <= 4
    assert {0, 1, 15, 30} < set(store.published()) and len(store.published()) < 20
    assert [entry for entry in store.journal if entry.startswith("ledger")] == [f"ledger {n}" for n in range(1, 31)]
    assert sum(seen.get("seconds_backlog", 0.0) for seen in store.written) < 1.0
    assert len(set(told)) > 2 and told == sorted(told)


def test_where_the_ledger_is_slow_versions_go_on_memory_is_bounded_and_the_wait_is_measured(tmp_path, alive):
    trainer, store = make(tmp_path, settings(training__steps=24, sync__checkpoint_every=100))
    # The ledger is slower than the steps on any machine.
    store.slow["ledger"] = lambda: 0.3 + 3 * EVERY * max(seen["seconds_forward_backward"] for seen in store.written)
    assert run_counting(trainer, store, alive, pause=0.0) <= 4
    assert len(store.published()) >= 5
    waited = sum(seen.get("seconds_backlog", 0.0) for seen in store.written)
    assert 0.3 < waited < sum(seen["seconds_step"] for seen in store.written)


def test_the_step_that_closes_a_sync_counts_what_the_copy_costs(tmp_path):
    trainer, store = make(tmp_path, settings())
    trainer.run()
    for record in store.records:
        closes = record.step % EVERY == 0
        assert ("seconds_snapshot" in record.metrics, "seconds_backlog" in record.metrics) == (closes, closes)
        parts = ("wait", "forward_backward", "snapshot", "backlog")
        spent = sum(record.metrics.get(f"seconds_{part}", 0.0) for part in parts)
        assert 0 < spent <= record.metrics["seconds_step"] < spent + 0.5


# --- Learning ---


class Lottery:
    """A buffer that fills itself: at each sync, with responses of the newest published version to one prompt. The
    reward of a response is its share of even tokens."""

    def __init__(self, folder: Path):
        reference = Policy.load(tiny_folder(folder), device="cpu")
        self.generator = TransformersGenerator(device="cpu", max_response_tokens=4)
        self.generator.adopt(folder, Version(0, 1))
        self.scorer = PolicyScorer(reference, Version(0, 1))
        self.prompt = Prompt(prompt_id="p", text="", tokens=(4, 13))
        self.newest: list[Trajectory] = []
        self.versions: list[int] = []
        self.adopting = threading.Lock()

    def publish(self, version: Version, *, folder: Path, **_: Any) -> None:
        with self.adopting:
            self.generator.adopt(folder, version)

    def sync(self, sync: int, *, step: int) -> int:
        with self.adopting:
            seeds = [range(1000 * sync, 1000 * sync + 32)]
            (responses,) = generate(self.generator, [self.prompt], seeds, temperature=1.0)
            ((*ref_logps,),) = self.scorer.token_logps([self.prompt], [responses], temperature=1.0)
            self.versions.append(responses[0].version_start.number)
        self.newest = [
            trajectory(
                prompt_tokens=self.prompt.tokens,
                response_tokens=r.tokens,
                ref_logps=logps,
                finished=r.finished,
                reward=sum(token % 2 == 0 for token in r.tokens) / 4,
            )
            for r, logps in zip(responses, ref_logps, strict=True)
        ]
        return 32

    def recorded(self, sync: int) -> bool:
        return True

    def waiting(self) -> int:
        return 0

    def queues(self) -> dict[str, Any]:
        return {}

    def restore(self, queues: Mapping[str, Any]) -> None: ...

    def draw(self, step: int) -> list[Draw]:
        return [
            Draw(step=step, slot=i, position=j, trajectory_id=f"{16 * i + j}", prompt_id="p", branch="recent",
                 weight=1.0, age=1)
            for i in range(2) for j in range(16)
        ]  # fmt: skip

    def fetch(self, draws: Sequence[Draw]) -> Fetched:
        return fetched_of([self.newest[int(draw.trajectory_id)] for draw in draws])


def test_the_reward_goes_up_while_versions_advance(tmp_path):
    config = settings(
        training__steps=40,
        training__prompts_per_step=2,
        training__responses_per_prompt=16,
        search__responses_per_prompt=16,
        search__initial_fill=32,
        training__learning_rate=5e-3,
        training__schedule="constant",
        training__stable_steps=None,
        training__decay_steps=0,
        objective__beta_start=0.1,
        objective__beta_end=0.1,
        sync__every=1,
        sync__checkpoint_every=100,
    )
    trainer, store = make(tmp_path, config, pause=0.05)
    lottery = Lottery(tmp_path / "start")
    trainer.ahead.buffer, trainer.syncs.versions.publish = lottery, lottery.publish
    trainer.run()
    rewards = [record.metrics["reward_mean"] for record in store.records]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:4]) / 4 + 0.2, rewards
    assert lottery.versions[-1] > 20
