"""Trajectory balance with log Z estimated from the group itself (the VarGrad form; TBA, arXiv:2503.18929).

Per prompt x and response y the residual is

    delta = log Z(x) + log pi(y|x) - log pi_ref(y|x) - r(x, y) / beta,

and the loss is the mean of its square. If log Z is the group's mean of r / beta - log(pi / pi_ref), the loss is the
variance of log(pi / pi_ref) - r / beta within each group. This loss is zero exactly if pi is proportional to
pi_ref exp(r / beta) on the drawn responses. That holds whichever policy sampled them, so no importance ratio is needed.
With a reference power other than 1, the target is pi_ref^power exp(r / beta).

With a behaviour share lambda above 0, the residual is proximal:

    delta = log Z(x) + log pi - (1 - lambda) log pi_ref - lambda log mu - (1 - lambda) r / beta

where mu sampled the response. A step then moves towards a geometric mixture of target and mu, so it is short where the
data is old. At mu = pi the residual is 1 - lambda times that of the target. So the policy ends at the target, for every
lambda below 1, if the data gets newer with it. Old data that stays in the buffer holds the policy back.

A measured lambda is 1 - ESS / K for each group, where ESS = (sum of rho)^2 / sum of rho^2 is the effective number of
its K responses, with rho = pi / mu. It is 0 on policy, where the loss is that of plain trajectory balance, and at most
1 - 1 / K, where a single response has all the weight.

Residuals can have weights w, which are constants: the loss is the mean of w delta^2, and log Z a mean with the weights
w. Any positive weights keep the target. Those of `tba/objectives/weights/` let a response count little once it has
become unlikely under the policy.

A learned log Z, as in synchronous GFlowNets, is the output of a model that reads the prompt. The loss is the same, and
its gradient moves log Z towards the mean of r / beta - log(pi / pi_ref) over the drawn responses. Both variants have
the same minimum.

Left out, as in the paper: clipping, and any normalisation by length or by the spread of rewards.
"""
# Shapes: P prompts in the batch, K responses per prompt.

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.objectives.groups import Anchor, Groups, Loss, check_groups, equal_rewards, has_equal_rewards
from tba.objectives.objective import Auxiliary, Objective, line
from tba.objectives.weights import WEIGHTS, ratio
from tba.runtime.lazy_torch import torch
from tba.settings import Positive, Tempering, settings

if TYPE_CHECKING:
    from torch import Tensor

LogZ = Literal["group", "leave-one-out"]
Weights = Literal["equal", "ratio", "mean-ratio", "second-moment"]


@settings
class TrajectoryBalance(Objective):
    """The variance of the residuals of trajectory balance within each group (VarGrad)."""

    name: Literal["trajectory-balance"] = "trajectory-balance"
    target_temperature_start: Tempering = 1.0
    """T at step 1: log pi_ref and reward / beta are both divided by T. A higher T flattens the target distribution."""
    target_temperature_steps: Positive = 1
    """Number of steps over which T moves to 1 in a straight line."""
    reference_temperature_end: Tempering = 1.0
    """Gamma at the end of its schedule: log pi_ref alone is divided by gamma, on top of T. A higher gamma weakens the
    pull of the reference."""
    reference_temperature_steps: Positive = 1
    """Number of steps over which gamma moves from 1 to its final value in a straight line."""
    log_z: Literal["group", "leave-one-out", "learned"] = "group"
    """How log Z is estimated. `group`: the mean over the whole group. `leave-one-out`: the mean over the other
    responses of the group. `learned`: the output of a model that is trained together with the policy."""
    log_z_learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """Peak learning rate of the model that learns log Z. The rate rises and falls by `training.schedule`, as the
    policy's does. Higher values let the estimate of log Z follow the policy faster. A value other than
    the default is refused unless `log_z` is `learned`."""
    anchor: Anchor = "reference"
    """Policy that the log-ratio is taken against: the reference, or the behaviour policy that sampled each response."""
    behaviour_share: Annotated[float, Field(ge=0, lt=1)] | Literal["measured"] = 0.0
    """Lambda: how much the policy that sampled a response counts in the target of a step. Higher values take shorter
    steps from old data. The final target is the same if the data gets newer and newer, as with
    `sampling.recent_share=1`; old data that stays in the buffer holds the policy back. 0 leaves that policy out.
    `measured` takes, for each group, 1 minus the effective share of its responses: 0 for responses of the policy
    itself, and more the more unequal their ratios are."""
    weights: Weights = "equal"
    """Weight of each response in the loss and in log Z. `equal`: 1. `ratio`: the probability of the response under the
    policy divided by that under the policy that sampled it, at most `weight_cap`. `mean-ratio`: the same as the
    geometric mean over its tokens. `second-moment`: 0 for the responses of a group whose log-ratio is furthest from 0,
    and 1 for the others."""
    weight_cap: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Largest weight of a response. Lower values treat responses that the policy has made more likely like others. For
    `second-moment`: the largest mean of the squared log-ratios of the responses that stay in a group. A value other
    than the default is refused where `weights` is `equal`."""

    @property
    def needs_reference(self) -> bool:
        return self.moves_reference or self.tempers or self.anchor == "reference"

    @property
    def needs_tokens(self) -> bool:
        return self.anchor == "behaviour" or self.behaviour_share != 0 or self.weights != "equal"

    @property
    def has_residuals(self) -> bool:
        return True

    def has_no_gradient(self, reward_PK: Tensor, equal_P: Tensor) -> Tensor:
        """Return [P]: true for groups of equal responses with equal rewards, whose residuals are all equal to their
        mean, 0. This does not hold for a learned log Z, nor if the residuals contain log-probabilities under the
        policies that sampled, which may be different ones."""
        if self.log_z == "learned" or self.anchor == "behaviour" or self.behaviour_share:
            return super().has_no_gradient(reward_PK, equal_P)
        return has_equal_rewards(reward_PK) & equal_P

    @property
    def auxiliary(self) -> Auxiliary | None:
        return Auxiliary("log_z", self.log_z_learning_rate) if self.log_z == "learned" else None

    @property
    def tempers(self) -> bool:
        return self.target_temperature_start != 1 or self.reference_temperature_end != 1

    def target_temperature_at(self, step: int) -> float:
        """Return T at a step: on a straight line from `target_temperature_start` at step 1 to 1."""
        return line(self.target_temperature_start, 1.0, min(1.0, (step - 1) / self.target_temperature_steps))

    def reference_temperature_at(self, step: int) -> float:
        """Return gamma at a step: on a straight line from 1 at step 1 to `reference_temperature_end`."""
        return line(1.0, self.reference_temperature_end, min(1.0, (step - 1) / self.reference_temperature_steps))

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        weight_PK, metrics = self._weights(groups)
        share = self.behaviour_share
        if share == "measured":
            share = measured_share(groups.logp_PK, groups.anchor_logp_PK("behaviour"))
            metrics["behaviour_share"] = share.mean()
        loss = trajectory_balance(
            groups.logp_PK,
            groups.anchor_logp_PK(self.anchor),
            groups.reward_PK,
            beta=beta,
            log_z=groups.needed("log_z_P") if self.log_z == "learned" else self.log_z,
            reference_power=groups.reference_power,
            behaviour_logp_PK=groups.anchor_logp_PK("behaviour") if self.behaviour_share else None,
            behaviour_share=share,
            weight_PK=weight_PK,
        )
        metrics |= {name: value for name, value in loss.metrics.items() if name != "log_ratio_mean"}
        metrics |= groups.log_ratio_mean  # to the reference, whatever the anchor is
        return loss._replace(metrics=metrics)

    def _weights(self, groups: Groups) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the weights of all responses, or None if they are equal, and metrics: the mean of pi / mu, and the
        share of weights that the cap changes."""
        if self.weights == "equal":
            return None, {}
        given = (groups.logp_PK.detach() - groups.anchor_logp_PK("behaviour"), groups.tokens_PK)
        weight_PK, uncut_PK = (WEIGHTS[self.weights](*given, cap) for cap in (self.weight_cap, math.inf))
        return weight_PK, {
            "ratio_mean": ratio(*given, math.inf).mean(),
            "ratio_cut": (weight_PK != uncut_PK).to(weight_PK).mean(),
        }

    @model_validator(mode="after")
    def _schedules_of_temperatures_apply(self) -> Self:
        for of, end in (("target_temperature", "start"), ("reference_temperature", "end")):
            if getattr(self, f"{of}_{end}") == 1 and (steps := getattr(self, f"{of}_steps")) != 1:
                raise ValueError(f"objective.{of}_steps does not apply where objective.{of}_{end} is 1, got {steps}")
        return self

    @model_validator(mode="after")
    def _settings_of_log_z_apply(self) -> Self:
        if self.log_z != "learned" and self.log_z_learning_rate != type(self).log_z_learning_rate:
            raise ValueError(
                f"objective.log_z_learning_rate does not apply where objective.log_z is {self.log_z!r}, "
                f"got {self.log_z_learning_rate}"
            )
        if self.log_z == "learned" and self.behaviour_share:
            raise ValueError(
                "objective.behaviour_share must be 0 where objective.log_z is 'learned', got "
                f"{self.behaviour_share}: log Z would depend on which policy sampled"
            )
        return self

    @model_validator(mode="after")
    def _settings_of_weights_apply(self) -> Self:
        if self.weights == "equal" and self.weight_cap != type(self).weight_cap:
            raise ValueError(
                f"objective.weight_cap does not apply where objective.weights is 'equal', got {self.weight_cap}"
            )
        if self.weights != "equal" and self.log_z == "leave-one-out":
            raise ValueError(
                f"objective.log_z must be 'group' or 'learned' where objective.weights is {self.weights!r}, got "
                "'leave-one-out': the other responses of a group may have hardly any weight"
            )
        return self

    @model_validator(mode="after")
    def _an_anchor_at_the_behaviour_policy_has_no_reference(self) -> Self:
        if self.anchor == "reference":
            return self
        if self.log_z == "learned":
            raise ValueError(
                "objective.log_z must be 'group' or 'leave-one-out' where objective.anchor is 'behaviour', got "
                "'learned'"
            )
        for name in (
            "reference_reset", "reference_decay", "target_temperature_start", "reference_temperature_end",
            "behaviour_share",
        ):  # fmt: skip
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(f"objective.{name} does not apply where objective.anchor is 'behaviour', got {value}")
        return self


def trajectory_balance(
    logp_PK: Tensor,
    ref_logp_PK: Tensor,
    reward_PK: Tensor,
    *,
    beta: float,
    log_z: LogZ | Tensor = "group",
    reference_power: float = 1.0,
    behaviour_logp_PK: Tensor | None = None,
    behaviour_share: float | Tensor = 0.0,
    weight_PK: Tensor | None = None,
) -> Loss:
    """Return the mean square of the residual `log Z + log pi - reference_power x log pi_ref - reward / beta`. With
    `behaviour_share` s, `s x log mu` is subtracted too, and the last two terms are multiplied by `1 - s`. s may be
    a tensor with a number for each group, [P]. With weights, each square is multiplied by its weight, and log Z is a
    mean with these weights.

    Log-probabilities are sums over the tokens of a response, both at the temperature of the run. `leave-one-out`
    estimates the log Z of a response from the other K - 1 responses. This multiplies residuals and gradient by
    K / (K - 1), because the mean over all K responses contains the response itself and is too close to it. A learned
    log Z is passed as a tensor, [P], and is differentiated. The residuals of a group then need not have mean 0.
    """
    _check(logp_PK, ref_logp_PK, reward_PK, beta)
    _check_options(logp_PK, behaviour_logp_PK, behaviour_share, weight_PK, log_z)
    log_ratio_PK = logp_PK - reference_power * ref_logp_PK
    target_PK = reward_PK / beta
    share = behaviour_share[:, None] if isinstance(behaviour_share, torch.Tensor) else behaviour_share
    if behaviour_logp_PK is not None:
        pull_PK = (1 - share) * reference_power * ref_logp_PK + share * behaviour_logp_PK
        log_ratio_PK, target_PK = logp_PK - pull_PK, (1 - share) * target_PK
    estimate_PK = (target_PK - log_ratio_PK).detach()
    learned = isinstance(log_z, torch.Tensor)
    log_z_P1 = log_z[:, None] if isinstance(log_z, torch.Tensor) else _mean(estimate_PK, weight_PK)
    if not learned and log_z == "leave-one-out":
        k = estimate_PK.shape[1]
        residual_PK = (k * log_z_P1 - estimate_PK) / (k - 1) + log_ratio_PK - target_PK
    else:
        residual_PK = log_z_P1 + log_ratio_PK - target_PK
    log_z_P = log_z_P1.detach().squeeze(1)
    detached_PK = residual_PK.detach()
    metrics = {
        "log_z": log_z_P.mean(),
        "log_ratio_mean": (logp_PK - ref_logp_PK).detach().mean(),
        "residual_abs": detached_PK.abs().mean(),
        "equal_rewards": equal_rewards(reward_PK),  # here only the reference or mu has an effect
    }
    if learned:
        metrics["residual_mean"] = detached_PK.mean()
    square_PK = residual_PK.square() if weight_PK is None else weight_PK * residual_PK.square()
    advantage_PK = -beta / (1 - share) * detached_PK
    return Loss(square_PK.mean(), metrics, advantage_PK, detached_PK, log_z_P)


def measured_share(logp_PK: Tensor, behaviour_logp_PK: Tensor) -> Tensor:
    """Return a behaviour share for each group, [P]: 1 minus the effective share of its responses, without gradient. It
    is at least 0, and at most 1 - 1 / K."""
    log_ratio_PK = (logp_PK - behaviour_logp_PK).detach()
    log_number_P = 2 * log_ratio_PK.logsumexp(dim=1) - (2 * log_ratio_PK).logsumexp(dim=1)
    return (1 - log_number_P.exp() / log_ratio_PK.shape[1]).clamp(min=0)


def _mean(value_PK: Tensor, weight_PK: Tensor | None) -> Tensor:
    """Return the weighted mean of each group, [P, 1]."""
    if weight_PK is None:
        return value_PK.mean(dim=1, keepdim=True)
    return (weight_PK * value_PK).sum(dim=1, keepdim=True) / weight_PK.sum(dim=1, keepdim=True)


def _check(logp_PK: Tensor, ref_logp_PK: Tensor, reward_PK: Tensor, beta: float) -> None:
    shapes = [tuple(tensor.shape) for tensor in (logp_PK, ref_logp_PK, reward_PK)]
    if len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(
            "log-probabilities, reference log-probabilities and rewards must have one shape [prompts, responses], "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    check_groups(reward_PK)
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive and finite, got {beta}")


def _check_options(
    logp_PK: Tensor,
    behaviour_logp_PK: Tensor | None,
    behaviour_share: float | Tensor,
    weight_PK: Tensor | None,
    log_z: LogZ | Tensor,
) -> None:
    is_measured = isinstance(behaviour_share, torch.Tensor)
    if not is_measured and not 0 <= behaviour_share < 1:
        raise ValueError(f"behaviour_share must be at least 0 and below 1, got {behaviour_share}")
    if (is_measured or behaviour_share > 0) != (behaviour_logp_PK is not None):
        raise ValueError(
            "log-probabilities under the sampling policy are needed exactly if behaviour_share is above 0, got "
            f"behaviour_share = {behaviour_share}"
        )
    for name, tensor in (("behaviour_logp_PK", behaviour_logp_PK), ("weight_PK", weight_PK)):
        if tensor is not None and tensor.shape != logp_PK.shape:
            raise ValueError(f"{name} must have the shape {list(logp_PK.shape)}, got {list(tensor.shape)}")
    if weight_PK is not None and not isinstance(log_z, torch.Tensor) and log_z == "leave-one-out":
        raise ValueError("log_z must not be 'leave-one-out' with weights: the others may have hardly any weight")
