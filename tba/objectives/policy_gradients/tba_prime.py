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

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tba.objectives.groups import Groups, Loss, has_equal_rewards
from tba.objectives.policy_gradients.policy_loss import PolicyGradient, centred, policy_gradient
from tba.settings import settings
from tba.types import CorrectionKind, Level, Normaliser

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 10.0


@settings
class TBAPrime(PolicyGradient):
    """TBA': trajectory balance as a policy gradient with capped importance ratios."""

    name: Literal["tba-prime"] = "tba-prime"
    correction: CorrectionKind = "cap"
    correction_level: Level = "token"
    normaliser: Normaliser = "row"
    centre: Literal["policy", "behaviour"] = "policy"
    """Policy under which the mean log-ratio of a group is taken: the current policy, or the behaviour policy that
    sampled the responses. The runs of the paper use the behaviour policy."""

    def has_no_gradient(self, reward_PK: Tensor, equal_P: Tensor) -> Tensor:
        """Return [P]: true for groups of equal responses with equal rewards, if the mean log-ratio is the policy's."""
        if self.centre == "behaviour":
            return super().has_no_gradient(reward_PK, equal_P)
        return has_equal_rewards(reward_PK) & equal_P

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def needs_tokens(self) -> bool:
        return True

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        log_ratio_PK = _log_ratio(groups, groups.logp_PKT.detach())
        at_policy = self.centre == "policy"
        mean_P1 = (log_ratio_PK if at_policy else _log_ratio(groups, groups.needed("behaviour_logp_PKT"))).mean(1, True)
        advantage_PK = centred(groups.reward_PK) - beta * (log_ratio_PK - mean_P1)
        return policy_gradient(groups, advantage_PK, self, beta=beta)


def _log_ratio(groups: Groups, logp_PKT: Tensor) -> Tensor:
    """Return the log-ratio of a policy to the reference for each response, [P, K]. The log-ratio of each token is
    clipped."""
    log_ratio_PKT = (logp_PKT - groups.needed("ref_logp_PKT")).clamp(-LARGEST, LARGEST)
    return (log_ratio_PKT * groups.mask_PKT).sum(dim=2)
