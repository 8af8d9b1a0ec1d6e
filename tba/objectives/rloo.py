"""RLOO: a response is compared with the mean of the others of its group (leave-one-out).

    L = - mean of A log pi(y|x),      A_i = R_i - mean of R_j over j != i = K / (K - 1) (R_i - mean of R)

with R = r - beta log(pi / ref), whose log-ratio is that of the policy as it is. So the gradient is that of trajectory
balance with leave-one-out log Z, times beta / 2, whoever sampled the responses; without the penalty nothing of that is
left, and the estimate is right on policy only.

Proximal RLOO, for data of another policy, maximises min(rho A, clip(rho) A) instead, with the reward alone and rho =
pi(y|x) / mu(y|x) of the whole response against what sampled it. Where the ratio is taken to the policy at the start of
the update, as in released code, it is 1.
"""

from tba.objectives.corrections import Correction
from tba.objectives.groups import Groups, Loss
from tba.objectives.policy_gradient import Surrogate, centred, policy_gradient, rewards

OWN = Surrogate(penalty="reward")
PROXIMAL = Surrogate(correction=Correction(kind="clip", level="response"))


def rloo(groups: Groups, *, beta: float, surrogate: Surrogate = OWN) -> Loss:
    k = groups.reward_PK.shape[1]
    advantage_PK = k / (k - 1) * centred(rewards(groups, surrogate, beta=beta))
    return policy_gradient(groups, advantage_PK, surrogate, beta=beta)
