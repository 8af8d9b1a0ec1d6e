"""The inputs and outputs of objectives: groups of responses, estimates for a whole batch, and the loss."""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from tba.runtime.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Anchor = Literal["reference", "behaviour"]
"""The policy to which a log-ratio is taken: the reference, or the policy that sampled the response."""
LARGEST = 20.0
"""Largest magnitude of a log-ratio before it is exponentiated, so that the result is finite."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A batch, or a part of one, as an objective sees it: K drawn responses to each of P prompts.

    Log-probabilities of tokens are 0 where the mask is false. They are taken at the temperature of the run.
    """

    logp_PKT: Tensor  # under the policy, differentiable
    mask_PKT: Tensor  # bool: the tokens of the response that count
    reward_PK: Tensor
    ref_logp_PK: Tensor | None = None  # of whole responses under the reference; None if nobody computed it
    ref_logp_PKT: Tensor | None = None  # of tokens under the reference, if needed
    behaviour_logp_PKT: Tensor | None = None  # of tokens under the policy that sampled them, if needed
    length_PK: Tensor | None = None  # tokens of prompt and response
    batch_reward: float | None = None  # mean reward of the whole batch
    batch_spread: float | None = None  # standard deviation, over the whole batch, of rewards less their group's mean
    batch_tokens: float | None = None  # mean number of tokens that count per response, over the whole batch
    max_tokens: int | None = None  # maximum length of a response
    reference_power: float = 1.0  # exponent of pi_ref in the target of trajectory balance
    step_value_PKT: Tensor | None = None  # value of the state before the token's reasoning step
    step_next_PKT: Tensor | None = None  # value of the state after this reasoning step; the reward after the last one
    value_PKT: Tensor | None = None  # prediction of a value model before each token, differentiable
    advantage_PKT: Tensor | None = None  # advantage of each token, estimated from the whole batch
    return_PKT: Tensor | None = None  # return of each token, estimated from the whole batch
    log_z_P: Tensor | None = None  # learned log Z, differentiable

    def __post_init__(self) -> None:
        wanted = {
            "mask_PKT": self.logp_PKT.shape,
            "ref_logp_PKT": self.logp_PKT.shape,
            "behaviour_logp_PKT": self.logp_PKT.shape,
            "reward_PK": self.logp_PKT.shape[:2],
            "ref_logp_PK": self.logp_PKT.shape[:2],
            "length_PK": self.logp_PKT.shape[:2],
            "step_value_PKT": self.logp_PKT.shape,
            "step_next_PKT": self.logp_PKT.shape,
            "value_PKT": self.logp_PKT.shape,
            "advantage_PKT": self.logp_PKT.shape,
            "return_PKT": self.logp_PKT.shape,
            "log_z_P": self.logp_PKT.shape[:1],
        }
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} must have the shape {list(shape)}, to fit logp_PKT, got {list(tensor.shape)}")
        check_groups(self.reward_PK)

    @property
    def logp_PK(self) -> Tensor:
        return self.logp_PKT.sum(dim=2)

    @property
    def tokens_PK(self) -> Tensor:
        """The number of counted tokens in each response."""
        return self.mask_PKT.sum(dim=2)

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens that count per response, over the whole batch."""
        if not self.batch_tokens:
            raise ValueError(f"batch_tokens must be positive to divide a loss by it, got {self.batch_tokens}")
        return self.batch_tokens

    @property
    def log_ratio_mean(self) -> Mapping[str, Tensor]:
        """The metric `log_ratio_mean`: the mean log-ratio of the policy to the reference, whatever the anchor of the
        objective is. Empty if nobody computed log-probabilities under the reference."""
        if self.ref_logp_PK is None:
            return {}
        return {"log_ratio_mean": (self.logp_PK - self.ref_logp_PK).detach().mean()}

    def anchor_logp_PK(self, anchor: Anchor) -> Tensor:
        """Return log-probabilities of whole responses under the anchor."""
        return self.needed("ref_logp_PK") if anchor == "reference" else self.needed("behaviour_logp_PKT").sum(dim=2)

    def needed(self, name: str) -> Tensor:
        """Return an optional field. Raise ValueError if this batch does not have it."""
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"this objective needs {name}, which the batch does not have")
        return tensor


def check_groups(reward_PK: Tensor) -> None:
    if len(reward_PK) < 1:
        raise ValueError("an objective needs at least 1 prompt, got 0")
    if reward_PK.shape[1] < 2:  # the loss would silently be 0
        raise ValueError(f"an objective needs at least 2 responses per prompt, got {reward_PK.shape[1]}")


class Estimates(NamedTuple):
    """Advantages, the returns that a value model learns, and metrics. An objective computes them from a whole batch,
    before the first gradient."""

    advantage_PKT: Tensor
    return_PKT: Tensor | None  # None if the objective learns no values
    metrics: Mapping[str, Tensor]  # [] each, over the whole batch

    def of(self, first: int, part: Groups) -> Groups:
        """Return `part` with the estimates of its tokens added. `part` begins at group `first` of the batch."""
        prompts, _, width = part.logp_PKT.shape
        rows = slice(first, first + prompts)
        returns = None if self.return_PKT is None else self.return_PKT[rows, :, :width]
        return replace(part, advantage_PKT=self.advantage_PKT[rows, :, :width], return_PKT=returns)

    def at(self, slots: Sequence[int]) -> Estimates:
        """Return the estimates of the groups in these slots of the batch. The metrics stay those of the whole batch."""
        rows = list(slots)
        returns = None if self.return_PKT is None else self.return_PKT[rows]
        return Estimates(self.advantage_PKT[rows], returns, self.metrics)


class Loss(NamedTuple):
    value: Tensor  # [] differentiate this
    metrics: Mapping[str, Tensor]  # [] each, detached, a mean over groups
    advantage_PK: Tensor  # detached; how strongly each response's log-probability is raised, before any ratio
    residual_PK: Tensor | None = None  # detached; None if the objective has no residual
    log_z_P: Tensor | None = None  # detached; one per group, even if each response has a log Z of its own


def ratio_moments(groups: Groups) -> dict[str, Tensor]:
    """Return the mean of pi / mu of whole responses, and the mean of its square. The first squared, divided by the
    second, is the effective share: 1 if all ratios are equal, and nearly 0 if few responses have all the weight."""
    log_ratio_PK = groups.logp_PK.detach() - groups.needed("behaviour_logp_PKT").sum(dim=2)
    ratio_PK = log_ratio_PK.double().clamp(-LARGEST, LARGEST).exp()
    return {"ratio_first": ratio_PK.mean(), "ratio_second": ratio_PK.square().mean()}


def has_equal_rewards(reward_PK: Tensor) -> Tensor:
    """Return [P]: whether all rewards of a group are equal."""
    return (reward_PK == reward_PK[:, :1]).all(dim=1)


def equal_rewards(reward_PK: Tensor) -> Tensor:
    """Return the share of groups in which all rewards are equal."""
    return has_equal_rewards(reward_PK).to(torch.get_default_dtype()).mean()
