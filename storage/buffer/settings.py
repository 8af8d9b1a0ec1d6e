"""The settings that a replay buffer reads, by section.

The sections of a `Config` of `tba.config` satisfy these protocols, but this package does not import them. Their
docstrings say what each setting means.
"""

from dataclasses import dataclass
from typing import Protocol

from tba.types import Eligibility


class Sampling(Protocol):
    @property
    def recent_share(self) -> float: ...
    @property
    def inv_temp(self) -> float: ...
    @property
    def eligibility(self) -> Eligibility: ...
    @property
    def mean_reward_between(self) -> tuple[float, float] | None: ...


class Training(Protocol):
    @property
    def prompts_per_step(self) -> int: ...
    @property
    def responses_per_prompt(self) -> int: ...


class Limits(Protocol):
    @property
    def memory_gb(self) -> float: ...
    @property
    def disk_gb(self) -> float: ...
    @property
    def draw_threads(self) -> int: ...


class Objective(Protocol):
    @property
    def needs_tokens(self) -> bool:
        """True if the objective needs the log-probability of each token under the policy that sampled it."""
        ...

    @property
    def needs_reference(self) -> bool:
        """True if the objective needs the log-probability of each token under the reference."""
        ...

    @property
    def needs_values(self) -> bool:
        """True if the objective needs the estimated values of the states between the reasoning steps of a response."""
        ...


class Settings(Protocol):
    """The part of a run's settings that a replay buffer uses."""

    @property
    def seed(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def training(self) -> Training: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def objective(self) -> Objective: ...


@dataclass(frozen=True)
class NoDraws:
    """Settings for an index from which nothing is drawn. They serve as `Sampling` and as `Training`. Such an index only
    says which rows could be drawn."""

    eligibility: Eligibility
    recent_share: float = 0.0
    inv_temp: float = 0.0
    mean_reward_between: tuple[float, float] | None = None
    prompts_per_step: int = 1
    responses_per_prompt: int = 1
