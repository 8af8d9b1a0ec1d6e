"""What the policy-gradient objectives share: an advantage for each response, a correction for old data, a penalty for
leaving the reference, and what the sum over tokens is divided by.

    L = - mean over responses of 1 / n sum over tokens [ correction(A) - beta k3 ],    k3 = ref / pi - 1 - log(ref / pi)

The penalty is there if it is `loss`; if it is `reward`, rewards are r - beta log(pi / ref) instead. A correction at the
level of responses has one term for each, and n divides the penalty alone.
"""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding.

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tba.objectives.corrections import Correction
from tba.objectives.groups import LARGEST, Groups, Loss, equal_rewards
from tba.types import Normaliser, Penalty


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """How rewards and advantages become a loss."""

    correction: Correction = field(default_factory=Correction)
    normaliser: Normaliser = "sum"
    max_tokens: int = 0
    """What `constant` divides by: the greatest length of a response."""
    penalty: Penalty = "none"


def policy_gradient(groups: Groups, advantage: Tensor, surrogate: Surrogate, *, beta: float) -> Loss:
    """Advantages, [P, K] of responses or [P, K, T] of their tokens, are constants to the gradient. Of tokens, a
    response's own is the mean of theirs."""
    advantage = advantage.detach()
    advantage_PK = advantage if advantage.ndim == 2 else _mean_of_tokens(groups, advantage)
    correction, n = surrogate.correction, _divisor(groups, surrogate)
    logp, behaviour_logp, advantage = _terms(groups, advantage, correction)
    maximised = correction.maximised(logp, behaviour_logp, advantage)
    if correction.level == "token":
        maximised = (maximised * groups.mask_PKT).sum(dim=2) / n
    metrics = {
        "log_ratio_mean": (groups.logp_PK.detach() - groups.ref_logp_PK).mean(),
        "equal_rewards": equal_rewards(groups.reward_PK),
    }
    if behaviour_logp is not None:
        ratio = correction.ratio(logp.detach(), behaviour_logp)
        for name, value in (("ratio_mean", ratio), ("ratio_cut", correction.cut(ratio))):
            if correction.level == "token":  # the mean of a response's, so that parts of a batch make up the whole
                value = _mean_of_tokens(groups, value)
            metrics[name] = value.to(groups.reward_PK.dtype).mean()
    if surrogate.penalty == "loss":
        away_PK = (k3(groups) * groups.mask_PKT).sum(dim=2)
        maximised = maximised - beta * away_PK / n
        metrics["k3"] = away_PK.detach().mean()
    return Loss(-maximised.mean(), metrics, advantage_PK)


def rewards(groups: Groups, surrogate: Surrogate, *, beta: float) -> Tensor:
    """[P, K] of the task, less the penalty if that is where it goes. The log-ratio has no gradient, and needs none: its
    expectation under the policy is 0."""
    if surrogate.penalty != "reward":
        return groups.reward_PK
    return groups.reward_PK - beta * (groups.logp_PK.detach() - groups.ref_logp_PK)


def k3(groups: Groups) -> Tensor:
    """[P, K, T] an estimate of KL(pi || ref) that is never negative; unbiased where pi sampled the token."""
    away_PKT = (groups.needed("ref_logp_PKT") - groups.logp_PKT).clamp(-LARGEST, LARGEST)
    return away_PKT.exp() - 1 - away_PKT


def centred(value_PK: Tensor) -> Tensor:
    return value_PK - value_PK.mean(dim=1, keepdim=True)


def _mean_of_tokens(groups: Groups, value_PKT: Tensor) -> Tensor:
    return (value_PKT * groups.mask_PKT).sum(dim=2) / groups.tokens_PK.clamp(min=1)


def _terms(groups: Groups, advantage: Tensor, correction: Correction) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probabilities and advantage of each token, or of each response."""
    behaviour_PKT = None if correction.kind == "none" else groups.needed("behaviour_logp_PKT")
    if correction.level == "token":
        return groups.logp_PKT, behaviour_PKT, advantage if advantage.ndim == 3 else advantage[:, :, None]
    if advantage.ndim == 3:
        raise ValueError(f"a correction of whole responses needs an advantage of each, got {list(advantage.shape)}")
    n_PK = groups.tokens_PK.clamp(min=1) if correction.level == "mean" else torch.ones_like(advantage)
    behaviour_PK = None if behaviour_PKT is None else behaviour_PKT.sum(dim=2) / n_PK
    return groups.logp_PK / n_PK, behaviour_PK, advantage


def _divisor(groups: Groups, surrogate: Surrogate) -> Tensor | float:
    match surrogate.normaliser:
        case "sum":
            return 1.0
        case "response":
            return groups.tokens_PK.clamp(min=1)
        case "row":
            return groups.needed("length_PK")
        case "tokens":
            return groups.mean_tokens
        case "constant":
            if surrogate.max_tokens < 1:
                raise ValueError(f"max_tokens must be >= 1, got {surrogate.max_tokens}")
            return surrogate.max_tokens
