"""The base class of all objectives: their common settings, and the properties that other parts of a run ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tba.objectives.groups import Estimates, Groups, Loss
from tba.runtime.lazy_torch import torch
from tba.settings import Beta, Count, Positive, settings

if TYPE_CHECKING:
    from torch import Tensor


class Auxiliary(NamedTuple):
    """A model that is trained together with the policy because the loss needs it."""

    kind: Literal["value", "log_z"]
    learning_rate: float  # 0 is the learning rate of the policy


@settings
class Objective(ABC):
    """The training objective: the loss, the temperature beta of its target, and the reference. The formulas are in
    docs/objectives.md."""

    name: str
    """Name of the training objective."""
    beta_start: Beta = 0.05
    """Beta at step 1: the weight of staying close to the reference. A lower beta follows the reward more strongly.
    `beta_start` can differ from `beta_end` only if `beta_target` and `beta_stop` are greater than 1."""
    beta_end: Beta = 0.05
    """Beta from step `beta_stop` on. For a constant beta, set `beta_start` and `beta_end` to the same value."""
    beta_target: Positive = 1
    """Number of steps that a straight line from `beta_start` to `beta_end` takes. Higher values change beta more
    slowly. `beta_stop` may end the line earlier."""
    beta_stop: Positive = 1
    """Step from which beta is `beta_end`, at most `beta_target`. Beta jumps there if the line has not arrived yet."""
    include_eos: bool = True
    """Whether a generated end token counts as part of the response. The GSM8K runs of the paper leave it out."""
    reference_reset: Count = 0
    """Number of steps between resets of the reference to the current policy. 0 never resets it."""
    reset_optimizer: bool = False
    """Whether the optimizer state is cleared when the reference is reset."""
    reference_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of itself that the reference keeps at each step; the rest is taken from the policy (an exponential moving
    average). Higher values move the reference more slowly. 0 keeps the reference fixed."""

    @abstractmethod
    def loss(self, groups: Groups, *, beta: float) -> Loss:
        """Compute the loss of a batch, or of a part of one."""

    def estimates(self, groups: Groups, *, beta: float) -> Estimates:
        """Return what `loss` needs from the whole batch. Called before any gradient is taken, and only if
        `needs_whole_batch` is true."""
        raise NotImplementedError

    def has_no_gradient(self, reward_PK: Tensor, equal_P: Tensor) -> Tensor:
        """Return [P]: true for each group whose loss and gradient are 0 whatever the policy is, so that the group need
        not be computed. `equal_P` is true for groups whose responses are all equal."""
        return torch.zeros_like(equal_P)

    @property
    def has_residuals(self) -> bool:
        """True if the loss has a residual for each response. The residual is 0 where `has_no_gradient` is true."""
        return False

    @property
    def needs_tokens(self) -> bool:
        """True if the loss needs the log-probability of each token under the policy that sampled the response, and also
        under the reference if `needs_reference`."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the reference can change the gradient. An objective whose loss does not use
        them returns `moves_reference` instead."""
        return True

    @property
    def moves_reference(self) -> bool:
        """Whether the reference is reset, or follows the policy."""
        return bool(self.reference_reset or self.reference_decay)

    @property
    def needs_values(self) -> bool:
        """Whether the loss needs values that searchers estimate for the states within responses."""
        return False

    @property
    def needs_whole_batch(self) -> bool:
        """Whether `estimates` has to see the whole batch before the gradients of its parts are taken."""
        return False

    @property
    def auxiliary(self) -> Auxiliary | None:
        """The model that is trained together with the policy because the loss needs it; None if there is none."""
        return None

    @property
    def tempers(self) -> bool:
        """Whether the exponent of the reference in the target differs from 1 at some step."""
        return False

    def target_temperature_at(self, step: int) -> float:
        """Return T, by which log pi_ref and reward / beta are both divided."""
        return 1.0

    def reference_temperature_at(self, step: int) -> float:
        """Return gamma, by which log pi_ref alone is divided, on top of T."""
        return 1.0

    @model_validator(mode="after")
    def _schedule_of_beta_is_complete(self) -> Self:
        if self.beta_stop > self.beta_target:
            raise ValueError(
                f"objective.beta_stop must be <= objective.beta_target ({self.beta_target}), got {self.beta_stop}"
            )
        if self.beta_stop == 1 and self.beta_start != self.beta_end:
            raise ValueError(
                f"objective.beta_start must be objective.beta_end ({self.beta_end:g}) where objective.beta_stop is 1, "
                f"got {self.beta_start:g}; for a schedule, set objective.beta_target and objective.beta_stop too"
            )
        return self

    @model_validator(mode="after")
    def _reference_moves_in_one_way(self) -> Self:
        if self.reference_reset and self.reference_decay:
            raise ValueError(
                f"objective.reference_decay must be 0 where the reference is reset (objective.reference_reset = "
                f"{self.reference_reset}), got {self.reference_decay}"
            )
        if self.reset_optimizer and not self.reference_reset:
            raise ValueError("objective.reset_optimizer does not apply where objective.reference_reset is 0, got True")
        return self


def line(start: float, end: float, done: float) -> float:
    return start * (1 - done) + end * done
