"""GRPO (arXiv:2402.03300) and Dr. GRPO (arXiv:2503.20783). Both compare rewards within a group and clip the ratio of
each token as in PPO.

    GRPO        A = (r - mean of r) / (std of r + 1e-4), the mean over each response's tokens, and beta k3 in the loss
    Dr. GRPO    A = r - mean of r, the sum over tokens divided by a constant, no penalty

std has the divisor K - 1. Dividing by std gives more weight to prompts whose rewards differ little, and the mean over
a response's own tokens favours short right answers and long wrong ones. Dr. GRPO leaves out both.
"""

from tba.objectives.corrections import Correction
from tba.objectives.groups import Groups, Loss
from tba.objectives.policy_gradient import Surrogate, centred, policy_gradient, rewards

EPSILON = 1e-4
OWN = Surrogate(correction=Correction(kind="clip"), normaliser="response", penalty="loss")
OWN_DR = Surrogate(correction=Correction(kind="clip"), normaliser="constant")
"""The surrogate of Dr. GRPO, in which the caller must still set the constant `max_tokens`."""


def grpo(groups: Groups, *, beta: float, surrogate: Surrogate = OWN) -> Loss:
    reward_PK = rewards(groups, surrogate, beta=beta)
    advantage_PK = centred(reward_PK) / (reward_PK.std(dim=1, keepdim=True) + EPSILON)
    return policy_gradient(groups, advantage_PK, surrogate, beta=beta)


def dr_grpo(groups: Groups, *, beta: float, surrogate: Surrogate) -> Loss:
    return policy_gradient(groups, centred(rewards(groups, surrogate, beta=beta)), surrogate, beta=beta)
