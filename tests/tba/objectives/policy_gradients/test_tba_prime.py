"""TBA' in closed form: how it differs from trajectory balance, its centre, and its cap of importance ratios."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy of L tokens.

import math

import torch

from benchmarks.harness import toy
from tba.objectives import trajectory_balance
from tba.objectives.policy_gradients.tba_prime import TBAPrime
from tests.support.tba.objective_examples import (
    BETA,
    OLD_NL,
    assert_close,
    given_tokens,
    gradient,
    groups_of,
    named,
    parameters,
)


def test_tba_prime_without_ratio_is_trajectory_balance():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(9, 4, 5), toy.random_rewards(9, 4, 5)
    groups = groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL)
    balance = trajectory_balance(groups.logp_PK, groups.ref_logp_PK, reward_PK, beta=BETA)
    loss = TBAPrime(correction="none", normaliser="sum").loss(groups, beta=BETA)
    assert_close(gradient(loss, logits), BETA / 2 * gradient(balance, logits))
    assert_close(loss.advantage_PK, balance.advantage_PK)


def test_tba_prime_on_policy_is_trajectory_balance_divided_by_lengths():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(9, 4, 5), toy.random_rewards(9, 4, 5)
    groups = groups_of(logits, chosen_PK, reward_PK)
    balance = trajectory_balance(groups.logp_PK, groups.ref_logp_PK, reward_PK, beta=BETA)
    expected = BETA / 2 * gradient(balance, logits) / (toy.L + 2)
    assert_close(gradient(TBAPrime().loss(groups, beta=BETA), logits), expected)


def test_centred_on_the_behaviour_all_responses_of_a_group_are_pulled_up_by_what_they_have_lost():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(9, 4, 5), toy.random_rewards(9, 4, 5)
    groups = groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL)
    symmetric, asymmetric = (TBAPrime(centre=it).loss(groups, beta=BETA) for it in ("policy", "behaviour"))
    lost_P1 = (OLD_NL[chosen_PK].sum(2) - groups.logp_PK.detach()).mean(1, keepdim=True)
    assert_close(symmetric.advantage_PK.sum(1), torch.zeros(4, dtype=torch.float64))
    assert_close(asymmetric.advantage_PK - symmetric.advantage_PK, BETA * lost_P1.expand(4, 5))


def test_of_tba_prime_a_token_beyond_the_cap_teaches_nothing_and_a_far_one_counts_as_ten():
    """Five tokens have the same probability as when they were sampled; one is nine times as likely."""
    old_PKT = torch.full((1, 2, 3), -3.0, dtype=torch.float64)
    logp_PKT = old_PKT.clone()
    logp_PKT[0, 0, 1] += math.log(9.0)
    logp_PKT.requires_grad_()
    groups = given_tokens(logp_PKT, old_PKT, torch.eye(2, dtype=torch.float64)[:1])
    taught = gradient(TBAPrime().loss(groups, beta=0.01), logp_PKT)[0, 0]
    assert taught[1] == 0 and (taught[[0, 2]] < 0).all()
    assert (gradient(named("tba-prime", correction="truncate")(groups, beta=0.01), logp_PKT)[0, 0] < 0).all()
    far_PKT = old_PKT.clone()
    far_PKT[0, 0, 0] = -13.0  # 12 below the reference's -1
    loss = TBAPrime().loss(given_tokens(far_PKT, far_PKT, torch.zeros(1, 2)), beta=BETA)
    assert_close(loss.advantage_PK, torch.tensor([[4.0, -4.0]], dtype=torch.float64) * BETA)  # -14 against -6
