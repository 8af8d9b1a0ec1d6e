"""Monte-Carlo values of states within responses, which VinePPO (arXiv:2410.01679) uses instead of a value model.

A state is a prompt and the first reasoning steps of a response to it. Its value is the mean reward of continuations:
the same policy completes the response from this state several times, at the same temperature and `top_p`, up to the
maximum length of a response. The seeds of the continuations are derived from the seed of the response. Responses that
begin alike share a state, whose value is estimated once. Only the first `search.value_steps` states of a response are
estimated. The value of a later state is the reward of the response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple, cast

from tba.config import SearchConfig
from tba.errors import ConfigError
from tba.generation.requests import generate
from tba.interfaces import Generator, TakesTurns, Task
from tba.search.scoring import Scoring
from tba.seeds import continuation_seed
from tba.tasks.steps import step_ends
from tba.types import Prompt, Response, Reward

_Key = tuple[str, tuple[int, ...]]  # prompt and tokens so far


class Steps(NamedTuple):
    """The reasoning steps of a response: after how many tokens each step ends, and the value of the state before each
    step."""

    ends: tuple[int, ...]
    values: tuple[float, ...]


def check_can_value(task: Task, config: SearchConfig) -> None:
    if config.value_samples and isinstance(task, TakesTurns):
        raise ConfigError(
            f"search.value_samples must be 0 for task {task.name!r}, which answers back: its answers to "
            f"continuations are unknown, got {config.value_samples}"
        )


def estimate(
    scoring: Scoring,
    generator: Generator,
    config: SearchConfig,
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[Response]],
    rewards: Sequence[Sequence[Reward]],
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Steps]]:
    """Estimate the value of each state by sampling continuations. Return, per prompt and response, where the reasoning
    steps end and the value before each. All responses must have the same temperature and `top_p`. `tell(done, total)`
    is called during the work with numbers of states; an error that it raises stops the work."""
    most = config.value_steps or None
    divided = [
        [
            _Divided(prompt, response, step_ends(scoring.task, generator.tokenizer, response), reward.value)
            for response, reward in pairs
        ]
        for prompt, pairs in zip(prompts, map(zip, responses, rewards), strict=True)
    ]
    states: dict[_Key, _State] = {}
    for response in chain.from_iterable(divided):
        for state in response.states[:most]:
            states.setdefault(state.key, state)
    means: list[float] = []
    piece = max(1, config.batch_responses // config.value_samples)
    for first in range(0, len(states), piece):
        if first:
            tell(first, len(states))
        means += _means(scoring, generator, config, list(states.values())[first : first + piece])
    values = dict(zip(states, means, strict=True))
    return [[Steps(response.ends, response.values(values, most)) for response in group] for group in divided]


def _means(scoring: Scoring, generator: Generator, config: SearchConfig, states: "Sequence[_State]") -> list[float]:
    """Generate and score the continuations of all these states together, and return their mean reward per state."""
    sampled = states[0].response
    continuations = generate(
        generator,
        [state.so_far for state in states],
        [[state.seed(n) for n in range(config.value_samples)] for state in states],
        temperature=sampled.temperature,
        top_p=sampled.top_p,
        limits=[config.max_response_tokens - state.tokens for state in states],
    )
    whole = [
        [state.continued(continuation, generator.tokenizer) for continuation in group]
        for state, group in zip(states, continuations, strict=True)
    ]
    rewards = scoring.rewards([state.prompt for state in states], whole)
    return [fmean(reward.value for reward in group) for group in rewards]


@dataclass(frozen=True)
class _State:
    """A prompt and the first `tokens` tokens of a response to it."""

    prompt: Prompt
    response: Response
    tokens: int

    @property
    def key(self) -> _Key:
        """A key that is the same for the states of responses that begin alike."""
        return self.prompt.prompt_id, self.response.tokens[: self.tokens]

    @property
    def so_far(self) -> Prompt:
        return replace(self.prompt, tokens=self.prompt.tokens + self.response.tokens[: self.tokens])

    def seed(self, number: int) -> int:
        return continuation_seed(self.response.seed, self.tokens, number)

    def continued(self, continuation: Response, tokenizer: Any) -> Response:
        """Return the whole response: the first tokens and the continuation."""
        tokens = self.response.tokens[: self.tokens] + continuation.tokens
        return replace(
            continuation,
            tokens=tokens,
            logps=self.response.logps[: self.tokens] + continuation.logps,
            text=cast(str, tokenizer.decode(tokens, skip_special_tokens=True)),
        )


@dataclass(frozen=True)
class _Divided:
    """A response divided into reasoning steps."""

    prompt: Prompt
    response: Response
    ends: tuple[int, ...]
    reward: float

    @property
    def states(self) -> list[_State]:
        """The state before each reasoning step."""
        return [_State(self.prompt, self.response, tokens) for tokens in (0, *self.ends[:-1])]

    def values(self, estimates: Mapping[_Key, float], most: int | None) -> tuple[float, ...]:
        estimated = [estimates[state.key] for state in self.states[:most]]
        return (*estimated, *[self.reward] * (len(self.ends) - len(estimated)))
