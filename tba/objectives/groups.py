"""What objectives are computed from, and what each of them gives back."""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Anchor = Literal["reference", "behaviour"]
"""To which policy a log-ratio is taken: the reference, or what sampled the response."""
LARGEST = 20.0
"""Of a log-ratio before it is an exponent, so that whatever comes of it is finite."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Drawn responses, K to each of P prompts, and what is known of them: a batch, or a part of one.

    Log-probabilities of tokens are 0 where the mask is false, and at the temperature at which their policy is meant.
    """

    logp_PKT: Tensor  # under the policy, differentiable
    mask_PKT: Tensor  # bool: the tokens of the response that count
    reward_PK: Tensor
    ref_logp_PK: Tensor  # of whole responses under the reference
    ref_logp_PKT: Tensor | None = None  # token by token, for objectives that need it; the same of the next
    behaviour_logp_PKT: Tensor | None = None  # under what sampled the response, when it did
    length_PK: Tensor | None = None  # tokens of prompt and response
    batch_reward: float | None = None  # mean of the whole batch
    batch_tokens: float | None = None  # tokens that count per response, mean of the whole batch
    reference_power: float = 1.0  # of the reference in the target of trajectory balance
    step_value_PKT: Tensor | None = None  # estimated before the step that a token is of, by what sampled it
    step_next_PKT: Tensor | None = None  # after that step: after the last, the reward
    value_PKT: Tensor | None = None  # expected before each token by a value model, differentiable
    advantage_PKT: Tensor | None = None  # of each token, estimated from the whole batch; so is the next
    return_PKT: Tensor | None = None
    log_z_P: Tensor | None = None  # learned, differentiable

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
            found = getattr(self, name)
            if found is not None and found.shape != shape:
                raise ValueError(f"{name} must be {list(shape)}, as logp_PKT is, got {list(found.shape)}")
        check_groups(self.reward_PK)

    @property
    def logp_PK(self) -> Tensor:
        return self.logp_PKT.sum(dim=2)

    @property
    def tokens_PK(self) -> Tensor:
        """How many of each response count."""
        return self.mask_PKT.sum(dim=2)

    @property
    def mean_tokens(self) -> float:
        """Of the batch's responses: how many of each count."""
        if not self.batch_tokens:
            raise ValueError(f"a mean over the batch's tokens needs their number, got {self.batch_tokens}")
        return self.batch_tokens

    def anchor_logp_PK(self, anchor: Anchor) -> Tensor:
        """Of whole responses, under the policy to which a log-ratio is taken."""
        return self.ref_logp_PK if anchor == "reference" else self.needed("behaviour_logp_PKT").sum(dim=2)

    def needed(self, name: str) -> Tensor:
        """A field that not every batch has."""
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"this objective needs {name}, which the batch does not have")
        return found


def joined(parts: Sequence[Groups]) -> Groups:
    """Parts of a batch as the whole, padded to the widest."""
    width = max(part.logp_PKT.shape[2] for part in parts)

    def whole(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        if not isinstance(found[0], Tensor):
            return found[0]
        if found[0].ndim == 3:
            found = [torch.nn.functional.pad(it, (0, width - it.shape[2])) for it in found]
        return torch.cat(found)

    return Groups(**{field.name: whole(field.name) for field in fields(Groups)})


def check_groups(reward_PK: Tensor) -> None:
    if len(reward_PK) < 1:
        raise ValueError("needs at least 1 prompt, got 0")
    if reward_PK.shape[1] < 2:  # the loss would silently be 0
        raise ValueError(f"needs at least 2 responses per prompt, got {reward_PK.shape[1]}")


class Estimates(NamedTuple):
    """What an objective makes of a whole batch before any gradient is taken."""

    advantage_PKT: Tensor
    return_PKT: Tensor | None  # of objectives that learn values
    metrics: Mapping[str, Tensor]  # [] each, of the whole batch

    def of(self, first: int, part: Groups) -> Groups:
        """A part of the batch, from this group on, with what was estimated for it."""
        prompts, _, width = part.logp_PKT.shape
        rows = slice(first, first + prompts)
        returns = None if self.return_PKT is None else self.return_PKT[rows, :, :width]
        return replace(part, advantage_PKT=self.advantage_PKT[rows, :, :width], return_PKT=returns)


class Loss(NamedTuple):
    value: Tensor  # [] differentiate this
    metrics: Mapping[str, Tensor]  # [] each, detached, a mean over groups
    advantage_PK: Tensor  # detached; what raises a response's log-probability, before any ratio
    residual_PK: Tensor | None = None  # detached; for objectives that balance something
    log_z_P: Tensor | None = None  # detached; of each group, also where each response has a log Z of its own


def equal_rewards(reward_PK: Tensor) -> Tensor:
    """The share of groups whose rewards do not tell one response from another."""
    return (reward_PK == reward_PK[:, :1]).all(dim=1).to(torch.get_default_dtype()).mean()
