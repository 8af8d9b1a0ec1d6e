"""VinePPO (arXiv:2410.01679): PPO's policy loss with Monte-Carlo values from the states between steps, and no critic.

    A_t = V(after the step of token t) - V(before it),    V after the last step is the reward

    L = - mean over tokens of min(rho A, clip(rho, 1 - low, 1 + high) A) + beta k3,    A whitened over the batch

Values were estimated when the response was sampled: each is the mean reward of continuations by the policy that sampled
it. A response's advantages, step by step, add up to r - V of the prompt. On policy they expect the policy gradient: an
estimate is right in the mean and does not know how the response went on. From a state on that was not estimated, and
has the reward itself for its value, advantages are 0: those steps teach nothing but what whitening makes of a 0.

Left out: of k3 the paper sums over a response's tokens what it clips to [0, 10] at each; here it is a mean like the
rest, of log-ratios that are clipped.
"""

from tba.objectives.corrections import Correction
from tba.objectives.groups import Estimates, Groups, Loss
from tba.objectives.policy_gradient import Surrogate, policy_gradient
from tba.objectives.ppo import explained, whiten

OWN = Surrogate(correction=Correction(kind="clip"), normaliser="tokens", penalty="loss")


def estimates(groups: Groups, *, beta: float) -> Estimates:
    """Whitened advantages of each token of a whole batch."""
    mask_PKT = groups.mask_PKT
    value_PKT, next_PKT = groups.needed("step_value_PKT"), groups.needed("step_next_PKT")
    reward_PKT = groups.reward_PK[:, :, None].expand_as(value_PKT)
    metrics = {"explained_variance": explained(reward_PKT[mask_PKT], value_PKT[mask_PKT])}
    return Estimates(whiten(next_PKT - value_PKT, mask_PKT), None, metrics)


def vine_ppo(groups: Groups, *, beta: float, surrogate: Surrogate = OWN) -> Loss:
    return policy_gradient(groups, groups.needed("advantage_PKT"), surrogate, beta=beta)
