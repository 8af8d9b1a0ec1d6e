"""VinePPO: advantages of steps from the values between steps, and a learner that uses stored values."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy of L tokens, R its prefixes.

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness import toy
from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, tiny_policy, trajectory
from tba.batches.batching import Batch, collate
from tba.errors import DataError
from tba.objectives import Groups, Loss
from tba.objectives.policy_gradients.ppo import whiten
from tba.objectives.policy_gradients.vine_ppo import VinePPO
from tba.train.auxiliary_models import make_auxiliary_model
from tba.train.learner import Learner, as_groups
from tba.types import Trajectory
from tests.support.tba.objective_examples import BETA, assert_close, given_tokens, gradient, parameters
from tests.support.tba.trainers import Buffer, Journal, settings

OPTIONS: dict[str, Any] = {"responses_per_prompt": 2, "pad_id": PAD_ID, "include_eos": True, "by_step": True}


def divided(*ends: int, values: tuple[float, ...], reward: float, **changes: Any) -> Trajectory:
    tokens = (*range(5, 4 + ends[-1]), EOS_ID)
    return trajectory(response_tokens=tokens, step_ends=ends, step_values=values, reward=reward, **changes)


def advantages(batch: Batch) -> Tensor:
    """[B, T] advantages before whitening."""
    assert batch.step_value_BT is not None and batch.step_next_BT is not None
    return batch.step_next_BT - batch.step_value_BT


# --- from what is stored to advantages --------------------------------------------------------------------------------


@st.composite
def responses(draw: st.DrawFn) -> Trajectory:
    """Draw a response with numbers that are exact in float32."""
    eighths = st.integers(-80, 80).map(lambda n: n / 8)
    ends = (*sorted(draw(st.sets(st.integers(1, 8), max_size=5))), 9)
    values = draw(st.tuples(*[eighths] * len(ends)))
    return divided(*ends, values=values, reward=draw(eighths), prompt_tokens=(4,) * draw(st.integers(1, 3)))


@hypothesis_settings(max_examples=60, deadline=None)
@given(rows=st.lists(responses(), min_size=2, max_size=2))
def test_the_advantages_of_a_responses_steps_add_up_to_its_reward_less_the_value_of_the_prompt(rows: list[Trajectory]):
    found_BT = advantages(collate(fetched_of(rows), **OPTIONS))
    for row, found_T in zip(rows, found_BT, strict=True):
        assert row.step_ends is not None and row.step_values is not None
        first = len(row.prompt_tokens)
        counted = found_T[first : first + row.length].tolist()
        assert sum(counted[end - 1] for end in row.step_ends) == row.reward - row.step_values[0]
        of_step = np.searchsorted(row.step_ends, np.arange(row.length), side="right")
        for step, following in enumerate((*row.step_values[1:], row.reward)):
            assert {counted[t] for t in np.flatnonzero(of_step == step)} == {following - row.step_values[step]}
        assert not found_T[:first].any() and not found_T[first + row.length :].any()


@pytest.mark.parametrize("include_eos", [True, False])
def test_an_end_token_has_the_advantage_of_the_last_step_where_it_counts(include_eos: bool):
    rows = [divided(2, 4, values=(0.25, 0.5), reward=1.0), divided(1, 2, values=(0.5, 0.0), reward=0.0)]
    batch = collate(fetched_of(rows), **{**OPTIONS, "include_eos": include_eos})
    counted = [row[mask].tolist() for row, mask in zip(advantages(batch), batch.response_mask_BT, strict=True)]
    assert counted == [[0.25, 0.25, 0.5, 0.5][: 3 + include_eos], [-0.5, 0.0][: 1 + include_eos]]


def test_states_that_were_not_estimated_have_the_return_for_their_value_and_so_teach_nothing():
    """The last step before such a state gets the rest of the reward."""
    rows = [divided(1, 2, 3, 4, values=(0.25, 0.5, 1.0, 1.0), reward=1.0)] * 2
    assert advantages(collate(fetched_of(rows), **OPTIONS))[0].tolist() == [0, 0, 0.25, 0.5, 0, 0]


def test_a_response_without_values_is_named():
    rows = [divided(1, 3, values=(0.5, 0.5), reward=1.0), trajectory(trajectory_id="0/7/3")]
    with pytest.raises(DataError, match=r"'0/7/3' has no values of its steps: .* search\.value_samples was 0"):
        collate(fetched_of(rows), **OPTIONS)
    with pytest.raises(DataError, match="fetched without the values"):
        collate(replace(fetched_of(rows[:1] * 2), step_ends=None), **OPTIONS)
    damaged = divided(1, 2, values=(0.5, 0.5), reward=1.0, trajectory_id="0/7/4")
    damaged = replace(damaged, response_tokens=(5, 6, EOS_ID), ref_logps=(-1.0,) * 3)
    with pytest.raises(DataError, match="'0/7/4': 3 response tokens, but 2 tokens in its steps"):
        collate(fetched_of([rows[0], damaged]), **OPTIONS)


# --- what they expect -------------------------------------------------------------------------------------------------


def everything(logits: Tensor, reward_N: Tensor, ends: tuple[int, ...], cap: int | None = None) -> Groups:
    """Return every sequence of the toy once, in one group, with these ends of steps and exact values of the first
    states."""
    logp_NL = toy.token_logps(logits)
    value_R = toy.exact_values(logp_NL.detach(), reward_N)
    starts = [0, *ends[:-1]]
    of_state = [value_R[toy.PREFIX_ROWS_NL[:, start]] for start in starts[:cap]]
    of_state += [reward_N] * (len(starts) + 1 - len(of_state))
    steps = [step for step, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end)]
    return Groups(
        logp_PKT=logp_NL[None],
        mask_PKT=torch.ones(1, toy.N, toy.L, dtype=torch.bool),
        reward_PK=reward_N[None],
        ref_logp_PK=logp_NL.detach().sum(1)[None],
        step_value_PKT=torch.stack([of_state[step] for step in steps], dim=1)[None],
        step_next_PKT=torch.stack([of_state[step + 1] for step in steps], dim=1)[None],
        batch_tokens=float(toy.L),
    )


@pytest.mark.parametrize("ends", [(1, 2, 3), (2, 3), (1, 3), (3,)])
def test_with_exact_values_the_advantages_of_steps_expect_the_policy_gradient(ends: tuple[int, ...]):
    logits, reward_N = parameters(), toy.random_rewards(3, toy.N)
    groups = everything(logits, reward_N, ends)
    advantage_NL = (groups.needed("step_next_PKT") - groups.needed("step_value_PKT"))[0]
    probability_N = toy.sequence_logps(logits).exp()
    expected = torch.autograd.grad(probability_N @ reward_N, logits, retain_graph=True)[0]
    surrogate = probability_N.detach() @ (advantage_NL * groups.logp_PKT[0]).sum(1)
    assert_close(torch.autograd.grad(surrogate, logits)[0], expected)
    last_L = torch.tensor([end - 1 for end in ends])
    assert_close(advantage_NL[:, last_L].sum(1), reward_N - groups.needed("step_value_PKT")[0, :, 0])


def test_they_vary_less_than_the_return_they_add_up_to():
    logits, reward_N = parameters(), toy.random_rewards(3, toy.N)
    groups = everything(logits, reward_N, (1, 2, 3))
    advantage_NL = (groups.needed("step_next_PKT") - groups.needed("step_value_PKT"))[0]
    probability_N = groups.logp_PK.exp()[0].detach()
    plain_N = reward_N - groups.needed("step_value_PKT")[0, :, 0]
    assert ((probability_N @ advantage_NL.square()) < probability_N @ plain_N.square()).all()


@pytest.mark.parametrize("cap", [1, 2])
def test_capped_a_step_has_the_monte_carlo_return_and_those_that_follow_nothing(cap: int):
    reward_N = toy.random_rewards(3, toy.N)
    groups = everything(parameters(), reward_N, (1, 2, 3), cap)
    advantage_NL = (groups.needed("step_next_PKT") - groups.needed("step_value_PKT"))[0]
    assert_close(advantage_NL[:, cap - 1], reward_N - groups.needed("step_value_PKT")[0, :, cap - 1])
    assert not advantage_NL[:, cap:].any()
    whole = everything(parameters(), reward_N, (1, 2, 3))
    kept = (whole.needed("step_next_PKT") - whole.needed("step_value_PKT"))[0, :, : cap - 1]
    assert_close(advantage_NL[:, : cap - 1], kept)


# --- the loss ---------------------------------------------------------------------------------------------------------

MASK_PKT = torch.tensor([[[1, 1, 1, 0], [1, 1, 0, 0]], [[0, 1, 1, 1], [1, 0, 0, 0]]]).bool()


def loss_of(objective: VinePPO, groups: Groups) -> Loss:
    return objective.loss(objective.estimates(groups, beta=BETA).of(0, groups), beta=BETA)


def test_advantages_are_whitened_over_the_batch_and_go_through_the_clipped_loss():
    old_PKT = torch.full((2, 2, 4), -2.0, dtype=torch.float64)
    ratio_PKT = torch.tensor([0.5, 1.0, 1.5, 1.1]).double().expand(2, 2, 4)
    logp_PKT = (old_PKT + ratio_PKT.log()).requires_grad_()
    value_PKT, next_PKT = (toy.random_rewards(seed, 2, 2, 4) for seed in (1, 2))
    groups = given_tokens(logp_PKT, old_PKT, toy.random_rewards(3, 2, 2), MASK_PKT)
    groups = replace(groups, step_value_PKT=value_PKT, step_next_PKT=next_PKT)
    white_PKT = whiten(next_PKT - value_PKT, MASK_PKT)
    far_PKT = ((ratio_PKT > 1.2) & (white_PKT > 0)) | ((ratio_PKT < 0.8) & (white_PKT < 0))
    loss = loss_of(VinePPO(penalty="none"), groups)
    assert far_PKT[MASK_PKT].any()
    assert_close(gradient(loss, logp_PKT), -white_PKT * ratio_PKT * ~far_PKT * MASK_PKT / MASK_PKT.sum())


def test_leaving_the_reference_costs_beta_k3_in_the_loss():
    logp_PKT = (-toy.random_rewards(8, 2, 2, 4)).requires_grad_()
    groups = given_tokens(logp_PKT, logp_PKT.detach(), torch.zeros(2, 2), MASK_PKT)
    groups = replace(groups, step_value_PKT=torch.zeros(2, 2, 4), step_next_PKT=torch.zeros(2, 2, 4))
    loss = loss_of(VinePPO(), groups)
    away_PKT = (-1 - logp_PKT)[MASK_PKT]
    assert_close(loss.value, BETA * (away_PKT.exp() - 1 - away_PKT).mean())


def test_values_that_foretell_the_reward_explain_its_variance():
    groups = everything(parameters(), toy.random_rewards(3, toy.N), (3,))
    explained = VinePPO().estimates(groups, beta=BETA).metrics["explained_variance"]
    assert explained == pytest.approx(0, abs=1e-9)  # the same value for the only prompt
    groups = replace(groups, step_value_PKT=groups.reward_PK[:, :, None].expand(-1, -1, toy.L))
    assert VinePPO().estimates(groups, beta=BETA).metrics["explained_variance"] == 1


# --- a learner --------------------------------------------------------------------------------------------------------


def test_a_step_takes_the_stored_values_and_trains_the_policy_alone():
    config = settings(objective__name="vine-ppo", objective__penalty="none", training__groups_per_micro_batch=1)
    learner, buffer = Learner(config, tiny_policy()), Buffer(Journal())
    assert learner.auxiliary is None and make_auxiliary_model(config, learner.policy) is None
    rows = buffer.trajectories(buffer.draw(1))
    batch = learner.collate(fetched_of(rows))
    learned = learner.learn(1, batch)
    white_BT = whiten(advantages(batch), batch.response_mask_BT)
    n_B = batch.response_mask_BT.sum(1)
    assert [it.advantage for it in learned.outcomes] == pytest.approx((white_BT.sum(1) / n_B).tolist(), rel=1e-4)
    other = learner.collate(fetched_of([replace(row, step_values=(0.1, 0.9)) for row in rows]))
    found = [it.advantage for it in learner.learn(2, other).outcomes]
    assert found != pytest.approx([it.advantage for it in learned.outcomes], rel=1e-2)


def test_other_objectives_do_without_values():
    learner = Learner(settings(objective__name="grpo"), tiny_policy())
    batch = learner.collate(fetched_of([trajectory()] * 2))
    assert batch.step_value_BT is None and as_groups(torch.zeros(2, 5), batch, whole=batch).step_value_PKT is None
