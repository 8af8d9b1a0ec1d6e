"""RLOO: the reward of a response is compared with the mean reward of the other responses of its group (leave-one-out).

    L = - mean of A log pi(y|x),      A_i = R_i - mean of R_j over j != i = K / (K - 1) (R_i - mean of R)

with R = r - beta log(pi / ref), where pi is the current policy. The gradient is therefore that of trajectory balance
with leave-one-out log Z, times beta / 2, whichever policy sampled the responses. Without the penalty this does not
hold, and the gradient estimate is right only on policy.

Proximal RLOO is for data of another policy. It maximises min(rho A, clip(rho) A), where A uses the reward without
penalty, and rho = pi(y|x) / mu(y|x) is the ratio of the whole response to the policy mu that sampled it. Released code
takes the ratio to the policy at the start of the update; here that ratio would be 1.
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
