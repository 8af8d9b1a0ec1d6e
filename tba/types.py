"""The data types that all packages share: what searchers generate, storage keeps and a trainer learns from. This module
imports only the standard library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

Branch = Literal["recent", "prioritised"]
Evict = Literal["oldest", "worst"]
"""Which responses of a prompt are evicted first if the prompt has more than the capacity."""
Copies = Literal["newest", "all"]
"""Which of several identical responses to a prompt can be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Eligibility:
    """The rule that decides which responses in the replay buffer can be drawn. `SamplingConfig` explains each field.
    No field has a default, so that reading, drawing, compaction and removal all apply the same rule."""

    capacity: int
    evict: Evict
    copies: Copies
    max_age: int | None


CorrectionKind = Literal["none", "clip", "cap", "truncate", "cispo", "mask", "decoupled"]
"""How an objective corrects for data that another policy sampled. `tba.objectives.policy_gradients.corrections` has the
formulas."""
Level = Literal["token", "response", "mean"]
"""The level at which importance ratios are taken: per token, per response, or the geometric mean over a response's
tokens."""
Normaliser = Literal["sum", "response", "row", "group", "tokens", "constant"]
"""Number by which the sum over the tokens of a response is divided. `sum`: 1. `response`: the number of tokens of the
response. `row`: the number of tokens of prompt and response. `tokens`: the mean number of tokens per response in the
batch. `constant`: the maximum length of a response."""
Penalty = Literal["none", "reward", "loss"]
"""Where the KL penalty is applied: nowhere, in the reward, or in the loss."""


class Version(NamedTuple):
    """A published policy. `number` is the sync that published the policy (0 is the policy at the start), and `attempt`
    is the life of the trainer that published it. A version of a higher attempt is newer whatever its number, so compare
    versions by `Version.order`."""

    number: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.number:06d}-a{self.attempt:04d}"

    @property
    def order(self) -> tuple[int, int]:
        return (self.attempt, self.number)

    @classmethod
    def parse(cls, name: str) -> "Version":
        number, _, attempt = name.partition("-a")
        return cls(int(number), int(attempt))


class Base(NamedTuple):
    """A version that is stored whole. Other versions may be stored as their difference from this version."""

    version: Version
    folder: Path  # its files on this machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt, tokenised once for the whole run."""

    prompt_id: str
    text: str
    tokens: tuple[int, ...]
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON-able


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A request for one response from a generator. Requests compare by identity: two distinct requests are never
    equal."""

    prompt: Prompt
    seed: int
    limit: int  # maximum tokens of the response; the generator has a limit of its own, too
    temperature: float  # 0 is greedy
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What a generator sampled for one prompt."""

    tokens: tuple[int, ...]  # [T] with the EOS token last when `finished`
    logps: tuple[float, ...]  # [T] log-probabilities under the policy that generated each token, at `temperature`
    text: str
    finished: bool  # ended by EOS, not by the length limit
    temperature: float
    top_p: float
    seed: int
    version_start: Version
    version_end: Version
    generate_seconds: float  # sum of this response's equal shares of the time in which its batch was generated
    loss_mask: tuple[bool, ...] | None = None  # [T] which tokens the policy wrote; None: all. Other tokens have logp 0
    turns: tuple[str, ...] = ()  # the turns that make up `text`, if the task takes turns; the policy's come first


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One scored response: a row of a shard. `trajectory_id` is `searcher/seq/row`, and is known once the row is
    stored."""

    trajectory_id: str = ""
    searcher: int
    round: int
    slot: int  # place within the round
    version_start: Version
    version_end: Version
    prompt_id: str
    group_id: str  # `searcher/round/prompt_id`: the responses one prompt got in one round
    prompt: str
    response: str
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    behaviour_logps: tuple[float, ...]
    ref_logps: tuple[float, ...] | None  # None: the run does not compute them, because its objective needs none
    loss_mask: tuple[bool, ...] | None = None  # which tokens the policy wrote; None: all. Other tokens have logp 0
    step_ends: tuple[int, ...] | None = None  # number of tokens up to the end of each reasoning step; None: not divided
    step_values: tuple[float, ...] | None = None  # estimated value of the state before each reasoning step
    reference_version: Version
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    finished: bool
    temperature: float
    top_p: float
    seed: int
    created_at: datetime
    generate_seconds: float

    @property
    def length(self) -> int:
        return len(self.response_tokens)


class Asked(NamedTuple):
    """The request of a searcher that a stored trajectory answers."""

    round: int
    slot: int
    prompt_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One row of a batch: which trajectory a gradient step uses, and how the trajectory was chosen."""

    step: int
    slot: int  # 0 … prompts per step - 1; the rows of one slot are one group
    position: int  # 0 … K - 1 within the slot
    trajectory_id: str
    prompt_id: str
    branch: Branch
    weight: float  # probability that the first response drawn for the slot is this trajectory
    age: int  # gradient steps since the version that generated the trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a gradient step computed for one drawn row. Outcomes join to draws by step, slot and position."""

    slot: int
    position: int
    # If the step was skipped, each of the numbers below that is not finite is stored as None.
    advantage: float | None
    residual: float | None  # None if the objective has no residual
    log_z: float | None  # None if the objective has no log Z, or if the step did not compute the row
    logp: float | None  # None if the step did not compute the row
    ref_logp: float | None  # None if log-probabilities under the reference are not stored


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One gradient step as the ledger stores it: the draws, the outcomes of the drawn rows, and the metrics."""

    step: int
    sync: int  # the sync that closes the step
    version: Version  # the newest version that the step's starting weights descend from
    draws: Sequence[Draw]
    outcomes: Sequence[Outcome]
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One number of an evaluation of one version."""

    version: Version
    step: int
    metric: str  # `greedy`, `sampled`, `pass@4`, …
    value: float
    n: int
    """How many numbers `value` is the mean of: responses, or prompts for pass@k."""
    seconds: float
    """Seconds that the evaluation took. 0 if this score uses responses that were generated for another score."""
    temperature: float | None = None
    """Sampling temperature of the responses. `temperature` and `top_p` are None in old records, which lack them."""
    top_p: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The greedy response of one version to one held-out prompt, which an evaluation keeps for people to read. The
    texts may be shortened."""

    version: Version
    step: int
    prompt_id: str
    prompt: str
    response: str
    answer: str  # of the prompt; empty if the prompt has no answer
    reward: float  # NaN if the stored reward was not finite


Metrics = dict[str, float]
