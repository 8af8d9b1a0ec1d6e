"""The loss of policy gradients that choose, from the whole batch, the tokens that stay in the gradient.

    L = - mean over tokens of stays rho A,      A = (r - mean of r) / (std of r + 1e-4),      rho = pi / mu

The mean is over the tokens of the whole batch, so the batch is read once more, without gradients, before the loss is
computed. Tokens that are left out count in the divisor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tba.objectives.groups import LARGEST, Estimates, Groups, Loss, equal_rewards
from tba.objectives.objective import Objective
from tba.objectives.policy_gradients.grpo import standardised
from tba.settings import settings

if TYPE_CHECKING:
    from torch import Tensor


@settings
class TokenChoice(Objective):
    """The base class of these objectives."""

    @property
    def needs_whole_batch(self) -> bool:
        return True

    @property
    def needs_tokens(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return self.moves_reference

    @abstractmethod
    def stays(
        self, log_ratio_PKT: Tensor, advantage_PK: Tensor, mask_PKT: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return [P, K, T]: true for the tokens of the batch that count and stay; and metrics of the batch."""

    def estimates(self, groups: Groups, *, beta: float) -> Estimates:
        """Return the advantage of each token: that of its response, or 0 if the token is left out."""
        advantage_PK, mask_PKT = standardised(groups.reward_PK), groups.mask_PKT
        stays_PKT, metrics = self.stays(_log_ratio(groups).detach(), advantage_PK, mask_PKT)
        kept = stays_PKT.sum() / mask_PKT.sum().clamp(min=1)
        return Estimates(advantage_PK[:, :, None] * stays_PKT, None, {"ratio_cut": 1 - kept, **metrics})

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        advantage_PKT, tokens_PK = groups.needed("advantage_PKT"), groups.tokens_PK.clamp(min=1)
        ratio_PKT = _log_ratio(groups).clamp(-LARGEST, LARGEST).exp() * groups.mask_PKT
        gain_PK = (ratio_PKT * advantage_PKT).sum(dim=2)
        metrics = {
            **groups.log_ratio_mean,
            "equal_rewards": equal_rewards(groups.reward_PK),
            "ratio_mean": (ratio_PKT.detach().sum(dim=2) / tokens_PK).mean(),
        }
        return Loss(-gain_PK.mean() / groups.mean_tokens, metrics, advantage_PKT.sum(dim=2) / tokens_PK)


def _log_ratio(groups: Groups) -> Tensor:
    return groups.logp_PKT - groups.needed("behaviour_logp_PKT")
