"""The loss that the policy-gradient objectives share. It has an advantage for each response, a correction for old data,
a KL penalty, and a divisor n of the sum over tokens.

    L = - mean over responses of 1 / n sum over tokens [ correction(A) - beta k3 ],    k3 = ref / pi - 1 - log(ref / pi)

A below 0 is multiplied by `negative_share` first. The term beta k3 is there if `penalty` is `loss`. If `penalty` is
`reward`, rewards are r - beta log(pi / ref) instead. A correction at the level of responses has one term per response;
n then divides only the penalty.
"""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from tba.objectives.groups import LARGEST, Groups, Loss, equal_rewards, has_equal_rewards
from tba.objectives.objective import Objective
from tba.objectives.policy_gradients.corrections import Correction
from tba.runtime.lazy_torch import torch
from tba.settings import Share, settings
from tba.types import CorrectionKind, Normaliser, Penalty

if TYPE_CHECKING:
    from torch import Tensor

_USED_BY: Mapping[str, Sequence[CorrectionKind]] = {
    "correction_level": ("clip", "cap", "truncate", "cispo", "mask", "decoupled"),
    "clip_low": ("clip", "cispo", "decoupled"),
    "clip_high": ("clip", "cispo", "decoupled"),
    "ratio_cap": ("cap", "truncate", "mask"),
    "prox_share": ("decoupled",),
}
"""The corrections that use a setting. With other corrections the setting must keep its default."""


@settings
class PolicyGradient(Objective):
    """The base class of objectives that turn advantages into a loss. An objective that lets users choose the level of
    the correction, or the penalty, declares `correction_level` or `penalty` itself."""

    correction: CorrectionKind = "none"
    """Off-policy correction: how the loss accounts for responses that another policy sampled. `none`: not at all.
    docs/objectives.md has the formulas of the others."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Importance ratios are clipped below 1 minus this value. Higher values allow larger updates."""
    clip_high: Annotated[float, Field(ge=0, le=1e9)] = 0.2
    """Importance ratios are clipped above 1 plus this value. Higher values allow larger updates."""
    ratio_cap: Annotated[float, Field(ge=1, le=1e9)] = 8.0
    """Limit of the importance ratio for corrections that cap, truncate or mask. Higher values cut fewer ratios and let
    single responses weigh more."""
    prox_share: Share = 0.5
    """For the decoupled correction: position of the proximal policy between the behaviour policy (0) and the current
    policy (1)."""
    negative_share: Share = 1.0
    """Factor of advantages below 0. Lower values push bad responses down less, which is safer with old data. 0 learns
    only from advantages above 0; without a correction this is like supervised learning."""
    normaliser: Normaliser = "sum"
    """Number by which the sum over the counted tokens of a response is divided. `sum`: 1. `response`: the number of
    these tokens. `row`: the number of tokens of prompt and response. `group`: the mean number of counted tokens per
    response of the group. `tokens`: the same over the whole batch. `constant`: `search.max_response_tokens`."""

    @property
    def needs_tokens(self) -> bool:
        return self.correction != "none" or self.kl_penalty == "loss"

    @property
    def needs_reference(self) -> bool:
        return self.moves_reference or self.kl_penalty != "none"

    @property
    def kl_penalty(self) -> Penalty:
        return getattr(self, "penalty", "none")

    @property
    def ratio_correction(self) -> Correction:
        return Correction(
            kind=self.correction,
            level=getattr(self, "correction_level", "token"),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            cap=self.ratio_cap,
            prox_share=self.prox_share,
        )

    @model_validator(mode="after")
    def _settings_of_the_correction_apply(self) -> Self:
        for name, corrections in _USED_BY.items():
            value, default = (getattr(it, name, None) for it in (self, type(self)))
            if self.correction not in corrections and value != default:
                raise ValueError(
                    f"objective.{name} does not apply where objective.correction is {self.correction!r}, got {value!r}"
                )
        return self


@settings
class GroupPolicyGradient(PolicyGradient):
    """The base class of those objectives that compare the reward of a response with the other rewards of its group
    alone."""

    def has_no_gradient(self, reward_PK: Tensor, equal_P: Tensor) -> Tensor:
        """Return [P]: true for groups with equal rewards. With a penalty in the reward, the responses must be equal
        too, because the penalty depends on them. A penalty in the loss always has a gradient."""
        if self.kl_penalty == "loss":
            return super().has_no_gradient(reward_PK, equal_P)
        without = has_equal_rewards(reward_PK)
        return without & equal_P if self.kl_penalty == "reward" else without


def policy_gradient(groups: Groups, advantage: Tensor, objective: PolicyGradient, *, beta: float) -> Loss:
    """Compute the loss from advantages of responses, [P, K], or of tokens, [P, K, T]. No gradient goes through the
    advantages. If they are per token, the reported advantage of a response is their mean over its tokens. Both have the
    factor `negative_share` where they are below 0."""
    advantage = advantage.detach()
    advantage = torch.where(advantage < 0, objective.negative_share * advantage, advantage)
    advantage_PK = advantage if advantage.ndim == 2 else _mean_of_tokens(groups, advantage)
    correction, n = objective.ratio_correction, _divisor(groups, objective)
    logp, behaviour_logp, advantage = _terms(groups, advantage, correction)
    maximised = correction.maximised(logp, behaviour_logp, advantage)
    if correction.level == "token":
        maximised = (maximised * groups.mask_PKT).sum(dim=2) / n
    metrics = {
        **groups.log_ratio_mean,
        "equal_rewards": equal_rewards(groups.reward_PK),
    }
    if behaviour_logp is not None:
        ratio = correction.ratio(logp.detach(), behaviour_logp)
        for name, value in (("ratio_mean", ratio), ("ratio_cut", correction.cut(ratio))):
            if correction.level == "token":  # per response first, so that the means of a batch's parts add up
                value = _mean_of_tokens(groups, value)
            metrics[name] = value.to(groups.reward_PK.dtype).mean()
    if objective.kl_penalty == "loss":
        k3_PK = (k3(groups) * groups.mask_PKT).sum(dim=2)
        maximised = maximised - beta * k3_PK / n
        metrics["k3"] = k3_PK.detach().mean()
    return Loss(-maximised.mean(), metrics, advantage_PK)


def rewards(groups: Groups, objective: PolicyGradient, *, beta: float) -> Tensor:
    """Return the task's rewards, one for each response of each prompt, [P, K]. If `kl_penalty` is `reward`, subtract
    beta times log pi - log pi_ref of the response. No gradient flows through this penalty, and none is needed: under
    the policy, the mean of that gradient is 0."""
    if objective.kl_penalty != "reward":
        return groups.reward_PK
    return groups.reward_PK - beta * (groups.logp_PK.detach() - groups.needed("ref_logp_PK"))


def k3(groups: Groups) -> Tensor:
    """Return the estimate k3 of KL(pi || ref) for each token, [P, K, T]. k3 is never negative, and is unbiased if pi
    sampled the token."""
    log_ratio_PKT = (groups.needed("ref_logp_PKT") - groups.logp_PKT).clamp(-LARGEST, LARGEST)
    return log_ratio_PKT.exp() - 1 - log_ratio_PKT


def centred(value_PK: Tensor) -> Tensor:
    return value_PK - value_PK.mean(dim=1, keepdim=True)


def _mean_of_tokens(groups: Groups, value_PKT: Tensor) -> Tensor:
    return (value_PKT * groups.mask_PKT).sum(dim=2) / groups.tokens_PK.clamp(min=1)


def _terms(groups: Groups, advantage: Tensor, correction: Correction) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log-probabilities under the policy, log-probabilities under the sampling policy, and advantages. All are
    per token or all per response, depending on the level of the correction."""
    behaviour_PKT = None if correction.kind == "none" else groups.needed("behaviour_logp_PKT")
    if correction.level == "token":
        return groups.logp_PKT, behaviour_PKT, advantage if advantage.ndim == 3 else advantage[:, :, None]
    if advantage.ndim == 3:
        raise ValueError(f"a correction of whole responses needs [P, K] advantages, got {list(advantage.shape)}")
    n_PK = groups.tokens_PK.clamp(min=1) if correction.level == "mean" else torch.ones_like(advantage)
    behaviour_PK = None if behaviour_PKT is None else behaviour_PKT.sum(dim=2) / n_PK
    return groups.logp_PK / n_PK, behaviour_PK, advantage


def _divisor(groups: Groups, objective: PolicyGradient) -> Tensor | float:
    match objective.normaliser:
        case "sum":
            return 1.0
        case "response":
            return groups.tokens_PK.clamp(min=1)
        case "row":
            return groups.needed("length_PK")
        case "group":
            return groups.tokens_PK.to(groups.reward_PK.dtype).mean(dim=1, keepdim=True).clamp(min=1)
        case "tokens":
            return groups.mean_tokens
        case "constant":
            if not groups.max_tokens:
                raise ValueError(f"a constant divisor needs the maximum length of a response, got {groups.max_tokens}")
            return groups.max_tokens
