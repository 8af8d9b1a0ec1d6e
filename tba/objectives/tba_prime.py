"""TBA': trajectory balance as a policy gradient, with the importance ratio of each token capped (TBA, arXiv:2503.18929,
section 6).

    A_j = (r_j - mean of r) - beta (D_j - mean of D),      D_j = sum over tokens of clip(log(pi / ref), -10, 10)

    L = - mean of 1 / n_j sum over tokens min(rho, 8) A_j,      rho = pi / mu

D has no gradient. n_j counts the tokens of prompt and response, as in the paper's runs, so long responses weigh less.
With constant n, no ratio and no clipped log-ratio, the gradient is that of trajectory balance times beta / 2. The
paper's runs computed the mean of D with the policy that sampled (`centre="behaviour"`). This raises all responses of a
group, and raises older ones more.
"""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding.

from typing import Literal

from torch import Tensor

from tba.objectives.corrections import Correction
from tba.objectives.groups import Groups, Loss
from tba.objectives.policy_gradient import Surrogate, centred, policy_gradient

LARGEST = 10.0
OWN = Surrogate(correction=Correction(kind="cap", cap=8.0), normaliser="row")


def tba_prime(
    groups: Groups,
    *,
    beta: float,
    surrogate: Surrogate = OWN,
    centre: Literal["policy", "behaviour"] = "policy",
) -> Loss:
    away_PK = _away(groups, groups.logp_PKT.detach())
    mean_P1 = (away_PK if centre == "policy" else _away(groups, groups.needed("behaviour_logp_PKT"))).mean(1, True)
    advantage_PK = centred(groups.reward_PK) - beta * (away_PK - mean_P1)
    return policy_gradient(groups, advantage_PK, surrogate, beta=beta)


def _away(groups: Groups, logp_PKT: Tensor) -> Tensor:
    """Return the log-ratio of a policy to the reference for each response, [P, K]. The log-ratio of each token is
    clipped."""
    away_PKT = (logp_PKT - groups.needed("ref_logp_PKT")).clamp(-LARGEST, LARGEST)
    return (away_PKT * groups.mask_PKT).sum(dim=2)
