"""The properties of each objective, in closed form. Trajectory balance has its own file."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy, R x V its logits.

import math
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import OBJECTIVES, Groups, TrajectoryBalance, trajectory_balance
from tba.objectives.corrections import Correction
from tba.objectives.grpo import GRPO, DrGRPO
from tba.objectives.online_dpo import OnlineDPO
from tba.objectives.policy_gradient import policy_gradient
from tba.objectives.regressions import OAPL, Kimi
from tba.objectives.reinforce import Reinforce
from tba.objectives.rloo import RLOO, ProximalRLOO
from tba.objectives.tba_prime import TBAPrime
from tba.types import CorrectionKind
from tests.support.tba.objective_examples import (
    BETA,
    OLD_NL,
    REF_NL,
    VALUE_NL,
    after,
    assert_close,
    estimated,
    given_tokens,
    gradient,
    groups_of,
    named,
    parameters,
)

UNCORRECTED = RLOO(penalty="none")
NAMES = list(OBJECTIVES)
GRADIENTS = ("tba-prime", "reinforce", "rloo", "proximal-rloo", "grpo", "dr-grpo")
KINDS = get_args(CorrectionKind)  # the first kind corrects nothing


def scores_of(logits: Tensor, chosen_PK: Tensor) -> Tensor:
    """[P, K, R, V] the gradient of the log-probability of each response."""
    return torch.func.jacrev(toy.sequence_logps)(logits.detach())[chosen_PK]


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_order_padding_and_a_constant_added_to_rewards_change_nothing(name: str, seed: int):
    """The constant is also added to values between steps, because these are estimated from rewards."""
    chosen = {"gae_decay": 1.0} if name == "ppo" else {}  # otherwise, a constant counts less for early tokens
    objective, logits = named(name, **chosen), parameters()
    chosen_PK, reward_PK = toy.draw(seed, 3, 4), toy.random_rewards(seed, 3, 4)
    plain = objective(groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL), beta=BETA)
    order_P, order_K = torch.tensor([2, 0, 1]), torch.tensor([3, 1, 0, 2])

    def arranged(rows: Tensor) -> Tensor:
        return rows[order_P][:, order_K]

    other = objective(groups_of(logits, arranged(chosen_PK), arranged(reward_PK), old_NL=OLD_NL), beta=BETA)
    assert_close(other.value, plain.value)
    assert_close(other.advantage_PK, arranged(plain.advantage_PK))
    raised = groups_of(logits, chosen_PK, reward_PK + 7.0, old_NL=OLD_NL)
    values_PKT = VALUE_NL[chosen_PK] + 7.0
    shifted = objective(
        replace(raised, step_value_PKT=values_PKT, step_next_PKT=after(values_PKT, reward_PK + 7.0)), beta=BETA
    )
    padded = objective(padding(groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL)), beta=BETA)
    expected = gradient(plain, logits)
    for loss in (other, shifted, padded):
        assert_close(gradient(loss, logits), expected)


def padding(groups: Groups) -> Groups:
    """Add two columns that do not count."""
    wider = {
        name: torch.nn.functional.pad(it, (1, 1))
        for name, it in vars(groups).items()
        if isinstance(it, Tensor) and it.ndim == 3
    }
    return Groups(**{**vars(groups), **wider})


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_the_mean_of_its_parts(name: str):
    objective, logits = named(name), parameters()
    lengths_PK = torch.tensor([[1, 2, 3], [3, 3, 1], [2, 2, 2], [1, 1, 1]])  # so that parts differ in mean length
    chosen_PK, reward_PK = toy.draw(5, 4, 3), toy.random_rewards(5, 4, 3)
    mask_PKT = torch.arange(toy.L) < lengths_PK[:, :, None]
    whole = given_tokens(toy.token_logps(logits)[chosen_PK], OLD_NL[chosen_PK], reward_PK, mask_PKT)
    whole = estimated(OBJECTIVES[name](), whole)

    def part(rows: slice) -> Groups:
        return Groups(**{name: it[rows] if isinstance(it, Tensor) else it for name, it in vars(whole).items()})

    parts = [objective(part(rows), beta=BETA) for rows in (slice(0, 1), slice(1, 4))]
    expected = 0.25 * gradient(parts[0], logits) + 0.75 * gradient(parts[1], logits)
    assert_close(gradient(objective(whole, beta=BETA), logits), expected)


@pytest.mark.parametrize("name", [*GRADIENTS, "kimi", "oapl"])
def test_what_it_does_on_policy_is_what_its_advantages_say(name: str):
    """At pi = mu every correction is 1. Without a penalty in the loss, the gradient is the gradient of A log pi."""
    plain = {"normaliser": "sum", "penalty": "none"} if name in GRADIENTS[1:] else {}
    plain = {"normaliser": "sum"} if name == "tba-prime" else plain
    logits, chosen_PK, reward_PK = parameters(), toy.draw(6, 3, 4), toy.random_rewards(6, 3, 4)
    loss = named(name, **plain)(groups_of(logits, chosen_PK, reward_PK), beta=BETA)
    expected = -torch.einsum("pk,pkrv->rv", loss.advantage_PK, scores_of(logits, chosen_PK)) / 12
    scale = 2 * BETA if name in ("kimi", "oapl") else 1.0
    assert_close(gradient(loss, logits), scale * expected)


@pytest.mark.parametrize("name", ["rloo", "proximal-rloo", "grpo", "dr-grpo", "online-dpo"])
def test_equal_rewards_teach_nothing_without_a_reference(name: str):
    plain = {} if name == "online-dpo" else {"penalty": "none"}
    logits = parameters()
    loss = named(name, **plain)(groups_of(logits, toy.draw(7, 2, 4), torch.full((2, 4), 0.3)), beta=BETA)
    assert_close(gradient(loss, logits), torch.zeros_like(logits))
    assert loss.metrics["equal_rewards"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_numbers_stay_finite_however_far_policies_are_apart(name: str):
    logp_PKT = torch.full((2, 3, 4), -0.01, dtype=torch.float64).requires_grad_()
    far_PKT, near_PKT = (torch.full((2, 3, 4), it, dtype=torch.float64) for it in (-500.0, -4.8))
    pairs = ((logp_PKT, far_PKT), (far_PKT.clone().requires_grad_(), logp_PKT.detach()), (logp_PKT, near_PKT))
    for logp, old in pairs:
        loss = named(name)(given_tokens(logp, old, toy.random_rewards(8, 2, 3)), beta=BETA)
        assert loss.value.isfinite()
        assert gradient(loss, logp).isfinite().all()


def test_what_a_batch_lacks_is_named():
    groups = groups_of(parameters(), toy.draw(1, 2, 3), toy.random_rewards(1, 2, 3))
    lacking = Groups(**{**vars(groups), "behaviour_logp_PKT": None, "batch_reward": None})
    with pytest.raises(ValueError, match="this objective needs behaviour_logp_PKT"):
        GRPO().loss(lacking, beta=BETA)
    with pytest.raises(ValueError, match="mean reward of the batch"):
        Reinforce().loss(lacking, beta=BETA)
    with pytest.raises(ValueError, match="'clip' needs log-probabilities of the sampling policy, got None"):
        Correction(kind="clip").maximised(groups.logp_PK, None, groups.reward_PK)
    with pytest.raises(ValueError, match="needs the maximum length of a response, got None"):
        DrGRPO().loss(replace(groups, max_tokens=None), beta=BETA)
    with pytest.raises(ValueError, match=r"reward_PK must have the shape \[2, 3\], to fit logp_PKT, got \[3, 2\]"):
        Groups(**{**vars(groups), "reward_PK": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match="at least 2 responses per prompt, got 1"):
        groups_of(parameters(), toy.draw(1, 2, 1), torch.zeros(2, 1))


# --- TBA' -------------------------------------------------------------------------------------------------------------


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


# --- what settings choose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "direct"),
    [
        ({"log_z": "leave-one-out"}, lambda it: trajectory_balance(
            it.logp_PK, it.ref_logp_PK, it.reward_PK, beta=BETA, log_z="leave-one-out")),
        ({"anchor": "behaviour"}, lambda it: trajectory_balance(
            it.logp_PK, it.behaviour_logp_PKT.sum(2), it.reward_PK, beta=BETA)),
        ({"log_z": "learned"}, lambda it: trajectory_balance(
            it.logp_PK, it.ref_logp_PK, it.reward_PK, beta=BETA, log_z=it.log_z_P)),
    ],
)  # fmt: skip
def test_settings_choose_how_trajectory_balance_is_computed(chosen: dict[str, Any], direct: Any):
    logits = parameters()
    groups = groups_of(logits, toy.draw(24, 3, 4), toy.random_rewards(24, 3, 4), old_NL=OLD_NL)
    groups = replace(groups, log_z_P=torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
    loss, expected = TrajectoryBalance(**chosen).loss(groups, beta=BETA), direct(groups)
    assert_close(loss.value, expected.value)
    assert_close(gradient(loss, logits), gradient(expected, logits))
    assert not torch.equal(loss.value, TrajectoryBalance().loss(groups, beta=BETA).value)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("tba-prime", {"centre": "behaviour"}),
        ("kimi", {"anchor": "behaviour"}),
        ("oapl", {"anchor": "reference"}),
        ("oapl", {"value_beta": 2.0}),
        ("ppo", {"discount": 0.5}),
        ("ppo", {"gae_decay": 0.5}),
        ("ppo", {"value_share": 0.3}),
        *((name, {"normaliser": "sum"}) for name in ("tba-prime", "grpo", "dr-grpo", "ppo", "vine-ppo")),
        *((name, {"normaliser": "tokens"}) for name in ("reinforce", "rloo")),
        *((name, {"penalty": "loss"}) for name in ("reinforce", "rloo", "proximal-rloo", "dr-grpo", "ppo")),
        *((name, {"penalty": "none"}) for name in ("reinforce", "rloo", "grpo", "ppo", "vine-ppo")),
    ],
)
def test_a_setting_of_an_objective_changes_its_loss(name: str, chosen: dict[str, Any]):
    groups = groups_of(parameters(), toy.draw(24, 3, 4), toy.random_rewards(24, 3, 4), old_NL=OLD_NL)
    loss, plain = named(name, **chosen)(groups, beta=BETA), named(name)(groups, beta=BETA)
    assert not torch.equal(loss.value, plain.value)


@pytest.mark.parametrize("correction", KINDS)
@pytest.mark.parametrize("name", [*GRADIENTS, "ppo", "vine-ppo"])
def test_what_is_set_for_a_correction_changes_the_loss_or_is_refused(name: str, correction: str):
    groups = groups_of(parameters(), toy.draw(26, 6, 6), toy.random_rewards(26, 6, 6), old_NL=OLD_NL)
    plain = named(name, correction=correction)(groups, beta=BETA).value
    other = {"correction_level": "mean", "clip_low": 0.01, "clip_high": 0.01, "ratio_cap": 1.01, "prox_share": 0.1}
    refused = 0
    for setting, value in other.items():
        try:
            objective = named(name, correction=correction, **{setting: value})
        except ValidationError:
            refused += 1
        else:
            assert not torch.equal(objective(groups, beta=BETA).value, plain), setting
    assert refused


# --- REINFORCE, RLOO, GRPO --------------------------------------------------------------------------------------------


def test_advantages_of_the_group_methods_are_multiples_of_one_another():
    groups = groups_of(parameters(), toy.draw(10, 3, 4), toy.random_rewards(10, 3, 4))
    left_out = UNCORRECTED.loss(groups, beta=BETA).advantage_PK
    reward_PK = groups.reward_PK
    for i in range(4):
        others = reward_PK[:, [j for j in range(4) if j != i]]
        assert_close(left_out[:, i], reward_PK[:, i] - others.mean(1))
    assert_close(left_out.sum(1), torch.zeros(3, dtype=torch.float64))
    mean = DrGRPO().loss(groups, beta=BETA).advantage_PK
    assert_close(mean, 3 / 4 * left_out)
    scaled = GRPO().loss(groups, beta=BETA).advantage_PK
    assert_close(scaled, mean / (reward_PK.std(1, keepdim=True) + 1e-4))


def test_rloo_with_its_penalty_is_trajectory_balance_left_one_out():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(9, 4, 5), toy.random_rewards(9, 4, 5)
    groups = groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL)
    balance = trajectory_balance(groups.logp_PK, groups.ref_logp_PK, reward_PK, beta=BETA, log_z="leave-one-out")
    assert_close(gradient(RLOO().loss(groups, beta=BETA), logits), BETA / 2 * gradient(balance, logits))


def test_grpo_is_clipped_token_by_token_with_k3_in_the_loss():
    old_PKT = torch.full((1, 2, 4), -3.0, dtype=torch.float64)
    logp_PKT = old_PKT.clone()
    logp_PKT[0, 0, 1] += math.log(1.5)  # a token of the better response
    logp_PKT.requires_grad_()
    groups = given_tokens(logp_PKT, old_PKT, torch.eye(2, dtype=torch.float64)[:1])
    alone, dr = (named(name, penalty="none")(groups, beta=BETA) for name in ("grpo", "dr-grpo"))
    for loss in (alone, dr):
        assert gradient(loss, logp_PKT)[0, 0, 1] == 0
        assert (gradient(loss, logp_PKT)[0, 0, [0, 2, 3]] < 0).all()
    away_PKT = -1 - logp_PKT
    k3_PKT = away_PKT.exp() - 1 - away_PKT
    assert_close(GRPO().loss(groups, beta=BETA).value, alone.value + BETA * k3_PKT.mean())


def test_grpo_does_not_see_the_scale_of_rewards():
    chosen_PK, reward_PK = toy.draw(11, 3, 4), 100 * toy.random_rewards(11, 3, 4)
    groups = (groups_of(parameters(), chosen_PK, it) for it in (reward_PK, 5 * reward_PK - 3))
    once, again = (GRPO().loss(it, beta=BETA) for it in groups)
    assert_close(again.advantage_PK, once.advantage_PK, 1e-4)


def test_the_log_ratio_to_the_reference_counts_as_reward():
    groups = groups_of(parameters(), toy.draw(12, 3, 4), toy.random_rewards(12, 3, 4))
    in_reward_PK = groups.reward_PK - BETA * (groups.logp_PK.detach() - groups.ref_logp_PK)
    assert_close(
        RLOO().loss(groups, beta=BETA).advantage_PK, 4 / 3 * (in_reward_PK - in_reward_PK.mean(1, keepdim=True))
    )
    assert_close(Reinforce().loss(groups, beta=BETA).advantage_PK, in_reward_PK - groups.reward_PK.mean())


def test_longer_responses_weigh_more_unless_their_tokens_are_averaged():
    """T28: every response becomes twice as long, with the same probabilities of tokens."""
    token_PK1 = -torch.rand(2, 3, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    old_PK1, reward_PK = token_PK1 - 0.05, toy.random_rewards(13, 2, 3)
    short, long = (given_tokens(token_PK1.expand(2, 3, n), old_PK1.expand(2, 3, n), reward_PK) for n in (4, 8))
    for objective, factor in ((named("dr-grpo", penalty="none"), 2), (named("grpo", penalty="none"), 1)):
        assert_close(objective(long, beta=BETA).value, factor * objective(short, beta=BETA).value)
    averaged = named("dr-grpo", normaliser="tokens")
    assert_close(averaged(long, beta=BETA).value, averaged(short, beta=BETA).value)


@pytest.mark.parametrize(
    ("normaliser", "divisor"),
    [("sum", 1.0), ("response", torch.tensor([[1.0, 2], [3, 2]])), ("row", torch.tensor([[3.0, 4], [5, 4]])),
     ("tokens", 2.0), ("constant", 10.0)],
)  # fmt: skip
def test_what_the_sum_over_tokens_is_divided_by(normaliser: Any, divisor: Tensor | float):
    mask_PKT = torch.arange(4) < torch.tensor([[1, 2], [3, 2]])[:, :, None]
    logp_PKT = -toy.random_rewards(14, 2, 2, 4)
    groups = given_tokens(logp_PKT, logp_PKT, toy.random_rewards(14, 2, 2), mask_PKT)
    advantage_PK = toy.random_rewards(15, 2, 2)
    objective = RLOO(normaliser=normaliser)
    expected = -(advantage_PK * (logp_PKT * mask_PKT).sum(2) / divisor).mean()
    assert_close(policy_gradient(replace(groups, max_tokens=10), advantage_PK, objective, beta=BETA).value, expected)


def test_k3_is_never_negative_and_on_average_the_divergence():
    logits = parameters()
    everything = torch.arange(toy.N)[None]
    groups = groups_of(logits, everything, torch.zeros(1, toy.N))
    penalty = RLOO(penalty="loss")
    alone = policy_gradient(groups, torch.zeros(1, toy.N, dtype=torch.float64), penalty, beta=BETA)
    assert alone.metrics["k3"] >= 0
    probability_N = toy.sequence_logps(logits).exp()
    k3_NT = (REF_NL - toy.token_logps(logits)).expm1() - (REF_NL - toy.token_logps(logits))
    divergence = (probability_N * (toy.token_logps(logits) - REF_NL).sum(1)).sum()
    assert_close((probability_N * k3_NT.sum(1)).sum(), divergence)
    assert_close(alone.value, BETA * k3_NT.sum(1).mean())


def test_proximal_rloo_expects_what_rloo_does_on_policy():
    """T33: expectation over all pairs that the sampler can draw."""
    logits = parameters()
    pairs_PK = torch.tensor(list(product(range(toy.N), repeat=2)))
    reward_PK = toy.random_rewards(16, toy.N)[pairs_PK]
    unclipped = ProximalRLOO(clip_low=1.0, clip_high=1e9)

    def expected(sampler_NL: Tensor | None, objective: RLOO | ProximalRLOO) -> Tensor:
        weight_N = (toy.token_logps(logits).detach() if sampler_NL is None else sampler_NL).sum(1).exp()
        total = torch.zeros_like(logits)
        for pair_K, reward_K in zip(pairs_PK, reward_PK, strict=True):
            groups = groups_of(logits, pair_K[None], reward_K[None], old_NL=sampler_NL)
            total += weight_N[pair_K].prod() * gradient(objective.loss(groups, beta=BETA), logits)
        return total

    assert_close(expected(OLD_NL, unclipped), expected(None, UNCORRECTED))


# --- corrections ------------------------------------------------------------------------------------------------------


def maximised(kind: Any, log_ratio: float, advantage: float, **chosen: Any) -> tuple[float, float]:
    """Return value and gradient at a token with probability e^-1 under the policy that sampled it."""
    logp = torch.tensor(log_ratio - 1.0, dtype=torch.float64, requires_grad=True)
    old, weight = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    value = Correction(kind=kind, **chosen).maximised(logp, old, weight)
    return float(value.detach()), float(torch.autograd.grad(value, logp)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_nothing_is_corrected(kind: str):
    for advantage in (-2.0, 0.5):
        assert maximised(kind, 0.0, advantage)[1] == pytest.approx(advantage)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_ratio_within_bounds_is_the_weight(kind: str):
    """The ratio of the decoupled kind is taken to the proximal policy, but its total weight is the same."""
    for log_ratio, advantage in product((-0.15, 0.15), (-2.0, 0.5)):
        assert maximised(kind, log_ratio, advantage)[1] == pytest.approx(advantage * math.exp(log_ratio))


def test_a_clipped_ratio_teaches_nothing_more_where_it_has_gone_far_enough():
    far, near = math.log(1.5), math.log(0.5)
    assert maximised("clip", far, 1.0) == pytest.approx((1.2, 0.0))
    assert maximised("clip", near, -1.0) == pytest.approx((-0.8, 0.0))
    assert maximised("clip", far, -1.0) == pytest.approx((-1.5, -1.5))
    assert maximised("clip", near, 1.0) == pytest.approx((0.5, 0.5))


def test_beyond_its_cap_a_ratio_is_cut_off_or_bounded():
    beyond = math.log(9.0)
    assert maximised("cap", beyond, 2.0, cap=8.0) == pytest.approx((16.0, 0.0))
    assert maximised("truncate", beyond, 2.0, cap=8.0)[1] == pytest.approx(16.0)
    assert maximised("cispo", beyond, 2.0)[1] == pytest.approx(2.4)
    assert maximised("cispo", -beyond, 2.0)[1] == pytest.approx(1.6)
    assert maximised("mask", beyond, 2.0, cap=8.0) == (0.0, 0.0)
    assert maximised("mask", -beyond, 2.0, cap=8.0) == (0.0, 0.0)
    for log_ratio in (0.0, 1.0, 5.0):
        assert abs(maximised("truncate", log_ratio, 1.0, cap=2.0)[1]) <= 2.0


def test_a_decoupled_correction_lies_between_clipping_and_reweighing():
    for log_ratio, advantage in product((-1.0, 0.1, 1.0), (-1.0, 1.0)):
        assert maximised("decoupled", log_ratio, advantage, prox_share=0.0) == pytest.approx(
            maximised("clip", log_ratio, advantage)
        )
        weight = math.exp(log_ratio)
        assert maximised("decoupled", log_ratio, advantage, prox_share=1.0)[1] == pytest.approx(weight * advantage)


def test_a_ratio_of_means_is_the_geometric_mean_of_a_responses_tokens():
    """GSPO: ratios of short and long responses count the same."""
    mask_PKT = torch.arange(4) < torch.tensor([[2, 4]])[:, :, None]
    old_PKT = -toy.random_rewards(17, 1, 2, 4)
    logp_PKT = (old_PKT + 0.1).requires_grad_()
    gspo = RLOO(correction="clip", correction_level="mean")
    groups = given_tokens(logp_PKT, old_PKT, torch.tensor([[1.0, 0.0]], dtype=torch.float64), mask_PKT)
    advantage_PK = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    loss = policy_gradient(groups, advantage_PK, gspo, beta=BETA)
    assert_close(loss.value, torch.tensor(0.0, dtype=torch.float64))  # both ratios are e^0.1
    assert loss.metrics["ratio_mean"] == pytest.approx(math.exp(0.1))
    lengths = torch.tensor([[[2.0], [4.0]]])
    expected = -math.exp(0.1) * advantage_PK[:, :, None] / lengths * mask_PKT / 2
    assert_close(gradient(loss, logp_PKT), expected)


def test_a_ratio_of_whole_responses_is_the_product_of_its_tokens():
    groups = given_tokens(
        torch.full((1, 2, 4), -0.5, dtype=torch.float64),
        torch.full((1, 2, 4), -0.6, dtype=torch.float64),
        torch.eye(2)[:1],
    )
    loss = ProximalRLOO().loss(groups, beta=BETA)
    assert loss.metrics["ratio_mean"] == pytest.approx(math.exp(0.4))
    assert loss.metrics["ratio_cut"] == 1


def test_tokens_that_do_not_count_have_no_ratio():
    mask_PKT = torch.arange(3) < torch.tensor([[1, 2]])[:, :, None]
    logp_PKT = torch.tensor([[[-0.5, -9.0, -9.0], [-0.5, -0.5, -9.0]]], dtype=torch.float64)
    groups = given_tokens(logp_PKT, logp_PKT - 0.5, torch.eye(2)[:1], mask_PKT)
    found = GRPO().loss(groups, beta=BETA).metrics
    assert found["ratio_mean"] == pytest.approx(math.exp(0.5))
    assert found["ratio_cut"] == 1


# --- Online DPO -------------------------------------------------------------------------------------------------------


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


# --- regressions ------------------------------------------------------------------------------------------------------


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
