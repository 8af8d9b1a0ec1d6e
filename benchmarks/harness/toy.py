"""A universe small enough to count: every sequence of L tokens out of V, under a tabular autoregressive policy.

A policy is one row of logits per prefix, in float64. All sequences are known, so expectations are sums and the target
pi_ref exp(r / beta) / Z is exact. Tests can check mathematical properties up to rounding errors.
"""
# Shapes: N = V^L sequences, L tokens, V symbols, R prefixes shorter than L.

from itertools import product

import torch
from torch import Tensor

V = L = 3
SEQUENCES_NL = torch.tensor(list(product(range(V), repeat=L)))
N = len(SEQUENCES_NL)
R = sum(V**length for length in range(L))

# The prefix of length l that spells s in base V has row (number of shorter prefixes) + s.
PREFIX_ROWS_NL = torch.stack(
    [
        sum(V**shorter for shorter in range(length))
        + (SEQUENCES_NL[:, :length] * V ** torch.arange(length - 1, -1, -1)).sum(dim=1)
        for length in range(L)
    ],
    dim=1,
)

ALL_DIFFER_N = torch.tensor([float(len(set(s)) == L) for s in SEQUENCES_NL.tolist()], dtype=torch.float64)
"""A reward: 1 where all tokens differ, 0 elsewhere."""


def random_logits(seed: int, scale: float = 1.0) -> Tensor:
    """[R, V] the logits of a random policy."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(R, V, generator=generator, dtype=torch.float64)


def token_logps(logits_RV: Tensor) -> Tensor:
    """[N, L] log-probability of each token of each sequence, given those before it."""
    return torch.log_softmax(logits_RV, dim=-1)[PREFIX_ROWS_NL, SEQUENCES_NL]


def sequence_logps(logits_RV: Tensor) -> Tensor:
    """[N] log-probability of each sequence: the sum over its tokens."""
    return token_logps(logits_RV).sum(dim=1)


def target_logps(ref_logp_N: Tensor, reward_N: Tensor, beta: float) -> Tensor:
    """[N] the policy proportional to pi_ref exp(r / beta)."""
    return torch.log_softmax(ref_logp_N + reward_N / beta, dim=0)


def total_variation(logp_N: Tensor, other_logp_N: Tensor) -> float:
    return 0.5 * float((logp_N.exp() - other_logp_N.exp()).abs().sum())


def draw(seed: int, *shape: int) -> Tensor:
    """Indices of random sequences, repeats included."""
    return torch.randint(N, shape, generator=torch.Generator().manual_seed(seed))


def random_rewards(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_values(logp_NL: Tensor, reward_N: Tensor) -> Tensor:
    """[R] the mean reward of each prefix when the policy continues it."""
    probability_N, rows_N = logp_NL.sum(1).exp(), PREFIX_ROWS_NL.flatten()
    total_R, mass_R = (
        torch.zeros(R, dtype=torch.float64).index_add(0, rows_N, it[:, None].expand(-1, L).flatten())
        for it in (probability_N * reward_N, probability_N)
    )
    return total_R / mass_R


def soft_values(ref_NL: Tensor, reward_N: Tensor, beta: float) -> Tensor:
    """[R] beta log of the mean of exp(r / beta) over the reference's continuations of each prefix: its value at the
    target."""
    return beta * exact_values(ref_NL, (reward_N / beta).exp()).log()
