"""Online DPO: the preference between the best and the worst response."""
# Shapes: P prompts, K responses per prompt.

import math

import pytest
import torch

from benchmarks.harness import toy
from tba.objectives.online_dpo import OnlineDPO
from tests.support.tba.objective_examples import BETA, assert_close, gradient, groups_of, parameters, scores_of


def test_at_the_reference_the_preference_is_undecided():
    logits = toy.random_logits(1).requires_grad_()  # the policy starts at the reference
    reward_PK = torch.tensor([[0.2, 1.0, 0.0], [0.5, 0.1, 0.4]])
    loss = OnlineDPO().loss(groups_of(logits, toy.draw(18, 2, 3), reward_PK), beta=BETA)
    assert float(loss.value.detach()) == pytest.approx(math.log(2))


def test_the_best_is_raised_and_the_worst_lowered_by_how_little_they_are_apart():
    logits, chosen_PK = parameters(), torch.tensor([[0, 5, 26], [7, 8, 9]])
    reward_PK = torch.tensor([[0.2, 1.0, 0.0], [0.5, 0.5, 0.5]])
    groups = groups_of(logits, chosen_PK, reward_PK)
    loss = OnlineDPO().loss(groups, beta=BETA)
    log_ratio_K = (groups.logp_PK - groups.ref_logp_PK)[0].detach()
    weight = BETA * torch.sigmoid(-BETA * (log_ratio_K[1] - log_ratio_K[2]))
    scores_K = scores_of(logits, chosen_PK)[0]
    assert_close(gradient(loss, logits), -weight * (scores_K[1] - scores_K[2]) / 2)  # of two groups one is a tie
    assert_close(loss.advantage_PK, torch.tensor([[0, 1, -1], [0, 0, 0]]) * weight)
