"""The loss that the policy-gradient objectives share. It has an advantage for each response, a correction for old data,
a KL penalty, and a divisor n of the sum over tokens.

    L = - mean over responses of 1 / n sum over tokens [ correction(A) - beta k3 ],    k3 = ref / pi - 1 - log(ref / pi)

The term beta k3 is there if `penalty` is `loss`. If `penalty` is `reward`, rewards are r - beta log(pi / ref) instead.
A correction at the level of responses has one term per response; n then divides only the penalty.
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
    """The divisor of the normaliser `constant`: the maximum length of a response in tokens."""
    penalty: Penalty = "none"


def policy_gradient(groups: Groups, advantage: Tensor, surrogate: Surrogate, *, beta: float) -> Loss:
    """Compute the loss from advantages of responses, [P, K], or of tokens, [P, K, T]. No gradient goes through the
    advantages. If they are per token, the reported advantage of a response is their mean over its tokens."""
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
            if correction.level == "token":  # per response first, so that the means of a batch's parts add up
                value = _mean_of_tokens(groups, value)
            metrics[name] = value.to(groups.reward_PK.dtype).mean()
    if surrogate.penalty == "loss":
        away_PK = (k3(groups) * groups.mask_PKT).sum(dim=2)
        maximised = maximised - beta * away_PK / n
        metrics["k3"] = away_PK.detach().mean()
    return Loss(-maximised.mean(), metrics, advantage_PK)


def rewards(groups: Groups, surrogate: Surrogate, *, beta: float) -> Tensor:
    """Return the task's rewards, [P, K], less the penalty if `penalty` is `reward`. The log-ratio has no gradient. It
    needs none, because the expectation of its gradient under the policy is 0."""
    if surrogate.penalty != "reward":
        return groups.reward_PK
    return groups.reward_PK - beta * (groups.logp_PK.detach() - groups.ref_logp_PK)


def k3(groups: Groups) -> Tensor:
    """Return the estimate k3 of KL(pi || ref) for each token, [P, K, T]. k3 is never negative, and is unbiased if pi
    sampled the token."""
    away_PKT = (groups.needed("ref_logp_PKT") - groups.logp_PKT).clamp(-LARGEST, LARGEST)
    return away_PKT.exp() - 1 - away_PKT


def centred(value_PK: Tensor) -> Tensor:
    return value_PK - value_PK.mean(dim=1, keepdim=True)


def _mean_of_tokens(groups: Groups, value_PKT: Tensor) -> Tensor:
    return (value_PKT * groups.mask_PKT).sum(dim=2) / groups.tokens_PK.clamp(min=1)


def _terms(groups: Groups, advantage: Tensor, correction: Correction) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log-probabilities under the policy and under the sampling policy, and advantages. They are per token or
    per response, by the level of the correction."""
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
