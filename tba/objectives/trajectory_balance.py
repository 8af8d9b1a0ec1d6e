"""Trajectory balance with log Z estimated from the group itself (the VarGrad form; TBA, arXiv:2503.18929).

Per prompt x and response y the residual is

    delta = log Z(x) + log pi(y|x) - log pi_ref(y|x) - r(x, y) / beta,

and the loss is the mean of its square. With log Z taken as the group's mean of r / beta - log pi / pi_ref, that is
the variance of log pi / pi_ref - r / beta within each group. It is zero exactly where pi is proportional to
pi_ref exp(r / beta) on the responses at hand, whoever sampled them: no importance ratio is needed. The reference may
count more or less than once: then the target is pi_ref^power exp(r / beta).

A learned log Z, as in synchronous GFlowNets, is the output of a model of the prompt: the loss is the same, and its
gradient draws log Z towards the mean of r / beta - log pi / pi_ref over whatever is drawn. Both have one minimum.

Left out, as in the paper: clipping, and any normalisation by length or by the spread of rewards.
"""
# Shapes: P prompts in the batch, K responses per prompt.

import math
from typing import Literal

from torch import Tensor

from tba.objectives.groups import Loss, check_groups, equal_rewards

LogZ = Literal["group", "leave-one-out"]


def trajectory_balance(
    logp_PK: Tensor,
    ref_logp_PK: Tensor,
    reward_PK: Tensor,
    *,
    beta: float,
    log_z: LogZ | Tensor = "group",
    reference_power: float = 1.0,
) -> Loss:
    """Mean squared residual of `log Z + log pi - reference_power x log pi_ref - reward / beta`.

    Log-probabilities are sums over the tokens of a response, at the temperature at which both policies are meant.
    `leave-one-out` estimates a response's log Z from the other K - 1, which multiplies residuals and gradient by
    K / (K - 1): the mean over all K contains the response itself and is that much too close to it. One that is learned
    is given, [P], and differentiated; then residuals no longer have the mean 0 in a group.
    """
    _check(logp_PK, ref_logp_PK, reward_PK, beta)
    log_ratio_PK = logp_PK - reference_power * ref_logp_PK
    target_PK = reward_PK / beta
    estimate_PK = (target_PK - log_ratio_PK).detach()
    learned = isinstance(log_z, Tensor)
    log_z_P1 = log_z[:, None] if learned else estimate_PK.mean(dim=1, keepdim=True)
    if not learned and log_z == "leave-one-out":
        k = estimate_PK.shape[1]
        residual_PK = (k * log_z_P1 - estimate_PK) / (k - 1) + log_ratio_PK - target_PK
    else:
        residual_PK = log_z_P1 + log_ratio_PK - target_PK
    log_z_P = log_z_P1.detach().squeeze(1)
    found_PK = residual_PK.detach()
    metrics = {
        "log_z": log_z_P.mean(),
        "log_ratio_mean": (logp_PK - ref_logp_PK).detach().mean(),
        "residual_abs": found_PK.abs().mean(),
        "equal_rewards": equal_rewards(reward_PK),  # groups in which only the reference pulls
    }
    if learned:
        metrics["residual_mean"] = found_PK.mean()
    return Loss(residual_PK.square().mean(), metrics, -beta * found_PK, found_PK, log_z_P)


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
