"""Regressions to an anchor, in closed form: the objectives of Kimi and OAPL, and anchored trajectory balance."""
# Shapes: P prompts, K responses per prompt, T tokens, N outcomes of a softmax or sequences of the toy of L tokens.

import math
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import Groups
from tba.objectives.regressions import OAPL, Kimi
from tests.support.tba.objective_examples import BETA, OLD_NL, assert_close, gradient, groups_of, named, parameters


def flat(logits_N: Tensor, anchor_N: Tensor, reward_N: Tensor) -> Groups:
    """Return one group with every outcome of a softmax once."""
    logp_PKT = torch.log_softmax(logits_N, 0)[None, :, None]
    anchor_PKT = anchor_N[None, :, None]
    return Groups(
        logp_PKT=logp_PKT,
        mask_PKT=torch.ones_like(logp_PKT, dtype=torch.bool),
        reward_PK=reward_N[None],
        ref_logp_PK=anchor_N[None],
        ref_logp_PKT=anchor_PKT,
        behaviour_logp_PKT=anchor_PKT,
    )


def test_kimi_leads_where_its_fixed_point_equation_says():
    n = 5
    logits_N = toy.random_rewards(19, n).requires_grad_()
    anchor_N, reward_N = torch.log_softmax(toy.random_rewards(20, n), 0), toy.random_rewards(21, n)
    loss = Kimi().loss(flat(logits_N, anchor_N, reward_N), beta=BETA)
    pi_N = torch.softmax(logits_N, 0).detach()
    d_N = BETA * (pi_N.log() - anchor_N) - (reward_N - reward_N.mean())
    assert_close(gradient(loss, logits_N), 2 * BETA / n * (d_N - pi_N * d_N.sum()))


def test_oapl_is_content_with_the_tilted_behaviour():
    n = 5
    anchor_N, reward_N = torch.full((n,), -math.log(n), dtype=torch.float64), toy.random_rewards(22, n)
    target_N = torch.log_softmax(anchor_N + reward_N / BETA, 0).requires_grad_()
    groups = flat(target_N, anchor_N, reward_N)
    loss = OAPL().loss(groups, beta=BETA)
    assert loss.residual_PK is not None
    assert_close(loss.residual_PK, torch.zeros(1, n, dtype=torch.float64))
    assert_close(gradient(loss, target_N), torch.zeros(n, dtype=torch.float64))
    other = OAPL(value_beta=2.0).loss(groups, beta=BETA)
    assert other.log_z_P is not None
    assert_close(BETA * other.log_z_P, 2.0 * (torch.logsumexp(reward_N / 2.0, 0) - math.log(n))[None])


def test_balance_anchored_at_what_sampled_is_content_with_the_tilted_behaviour_whatever_the_reference():
    chosen_PK, reward_PK = toy.draw(25, 2, 4), toy.ALL_DIFFER_N[toy.draw(25, 2, 4)]
    tilted_N = toy.target_logps(OLD_NL.sum(1), toy.ALL_DIFFER_N, BETA)
    groups = replace(
        groups_of(parameters(), chosen_PK, reward_PK, old_NL=OLD_NL),
        logp_PKT=torch.nn.functional.pad(tilted_N[chosen_PK][:, :, None], (0, toy.L - 1)),
    )
    residual_PK = named("trajectory-balance", anchor="behaviour")(groups, beta=BETA).residual_PK
    assert residual_PK is not None
    assert_close(residual_PK, torch.zeros(2, 4, dtype=torch.float64))
    assert float(named("trajectory-balance")(groups, beta=BETA).value) > 1e-3


def test_a_regression_is_anchored_where_it_is_told():
    chosen_PK, reward_PK = toy.draw(23, 2, 3), toy.random_rewards(23, 2, 3)
    groups = groups_of(parameters(), chosen_PK, reward_PK, old_NL=OLD_NL)
    for objective in (Kimi, OAPL):
        to_reference, to_behaviour = (objective(anchor=it).loss(groups, beta=BETA) for it in ("reference", "behaviour"))
        assert to_reference.residual_PK is not None and to_behaviour.residual_PK is not None
        apart_PK = OLD_NL[chosen_PK].sum(2) - groups.ref_logp_PK
        assert_close(to_reference.residual_PK - to_behaviour.residual_PK, apart_PK)
