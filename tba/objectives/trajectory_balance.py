"""Trajectory balance with log Z estimated from the group itself (the VarGrad form; TBA, arXiv:2503.18929).

Per prompt x and response y the residual is

    delta = log Z(x) + log pi(y|x) - log pi_ref(y|x) - r(x, y) / beta,

and the loss is the mean of its square. If log Z is the group's mean of r / beta - log(pi / pi_ref), the loss is the
variance of log(pi / pi_ref) - r / beta within each group. This loss is zero exactly if pi is proportional to
pi_ref exp(r / beta) on the drawn responses. That holds whichever policy sampled them, so no importance ratio is needed.
With a reference power other than 1, the target is pi_ref^power exp(r / beta).

A learned log Z, as in synchronous GFlowNets, is the output of a model that reads the prompt. The loss is the same, and
its gradient moves log Z towards the mean of r / beta - log(pi / pi_ref) over the drawn responses. Both variants have
the same minimum.

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
    """Return the mean square of the residual `log Z + log pi - reference_power x log pi_ref - reward / beta`.

    Log-probabilities are sums over the tokens of a response, both at the temperature of the run. `leave-one-out`
    estimates the log Z of a response from the other K - 1 responses. This multiplies residuals and gradient by
    K / (K - 1), because the mean over all K responses contains the response itself and is too close to it. A learned
    log Z is passed as a tensor, [P], and is differentiated. The residuals of a group then need not have mean 0.
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
        "equal_rewards": equal_rewards(reward_PK),  # in these groups only the reference has an effect
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
