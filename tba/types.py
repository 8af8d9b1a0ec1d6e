"""The vocabulary: what searchers find, storage remembers and a trainer learns from. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

Branch = Literal["recent", "prioritised"]
Evict = Literal["oldest", "worst"]
"""Which responses of a prompt go first where there are more than the capacity."""
Copies = Literal["newest", "all"]
"""Which responses of a prompt that say the same can be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Eligibility:
    """Which of the responses that have entered the replay buffer can be drawn; `SamplingConfig` says what each means.
    Nothing has a default: whoever reads, draws, compacts or gives up goes by the same rule."""

    capacity: int
    evict: Evict
    copies: Copies
    max_age: int | None


CorrectionKind = Literal["none", "clip", "cap", "truncate", "cispo", "mask", "decoupled"]
"""How an objective makes up for data that another policy sampled; `tba.objectives.corrections` has the formulas."""
Level = Literal["token", "response", "mean"]
"""Of what an importance ratio is: each token, a whole response, or the geometric mean of a response's tokens."""
Normaliser = Literal["sum", "response", "row", "tokens", "constant"]
"""What the sum over a response's tokens is divided by: nothing, their number, that of prompt and response, the batch's
mean number, or the greatest possible one."""
Penalty = Literal["none", "reward", "loss"]
"""Where leaving the reference is penalised."""


class Version(NamedTuple):
    """A published policy: `number` is the sync it follows (0 = the start), `attempt` the life of the trainer
    that published it. A higher attempt is newer whatever its number, so versions compare by `Version.order`."""

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
    """A version that is stored whole, from which others may be stored as a difference."""

    version: Version
    folder: Path  # its files on this machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What is asked, tokenised once for the whole run."""

    prompt_id: str
    text: str
    tokens: tuple[int, ...]
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON-able


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One response that a generator is asked for. Two of them are never the same."""

    prompt: Prompt
    seed: int
    limit: int  # most tokens of the response; a generator has a limit of its own, too
    temperature: float  # 0 is greedy
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What a generator sampled for one prompt."""

    tokens: tuple[int, ...]  # [T] with the EOS token last when `finished`
    logps: tuple[float, ...]  # [T] of the policy that generated each token, at `temperature`
    text: str
    finished: bool  # ended by EOS, not by the length limit
    temperature: float
    top_p: float
    seed: int
    version_start: Version
    version_end: Version
    generate_seconds: float  # this response's share of the batch it was generated in
    loss_mask: tuple[bool, ...] | None = None  # [T] which tokens the policy wrote; None: all. `logps` of others are 0
    turns: tuple[str, ...] = ()  # of a task that takes turns: the texts that make up `text`, every other by the policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One scored response: a row of a shard. `trajectory_id` is `searcher/seq/row`, known once it is stored."""

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
    ref_logps: tuple[float, ...]
    loss_mask: tuple[bool, ...] | None = None  # which tokens the policy wrote; None: all. Others have logps of 0
    step_ends: tuple[int, ...] | None = None  # after how many tokens each of its steps ends; None: not divided
    step_values: tuple[float, ...] | None = None  # what the policy earned on average from the state before each step
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
    """Which of the requests of its searcher a stored trajectory answers."""

    round: int
    slot: int
    prompt_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One row of a batch: which trajectory a gradient step uses, and how it was chosen."""

    step: int
    slot: int  # 0 … prompts per step - 1; the rows of one slot are one group
    position: int  # 0 … K - 1 within the slot
    trajectory_id: str
    prompt_id: str
    branch: Branch
    weight: float  # probability with which the first response of the slot would have been this one
    age: int  # steps since the version that generated it


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a gradient step found for one drawn row; joins to `Draw` by step, slot and position."""

    slot: int
    position: int
    advantage: float | None  # what is not finite is not known, in a step that is skipped; so are the next
    residual: float | None  # of objectives that balance something; so is log_z
    log_z: float | None
    logp: float | None
    ref_logp: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One gradient step as the ledger keeps it: what it drew, what it found, what it measured."""

    step: int
    sync: int  # the sync that closes it
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
    """How many numbers it is the mean of: responses, or with pass@k prompts."""
    seconds: float
    """0 for what is counted from responses that were generated for another score."""
    temperature: float | None = None
    """Of the responses, like `top_p`; None in records from before it was stored."""
    top_p: float | None = None


Metrics = dict[str, float]
