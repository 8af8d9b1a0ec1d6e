"""Monte-Carlo values of states within responses, as VinePPO (arXiv:2410.01679) has them in place of a value model.

A state is a prompt and the first steps of a response to it. Its value is the mean reward of continuations: responses
that begin with these steps and go on as the policy that wrote them does, at the same temperature and `top_p`, within
what is left of the greatest length. Seeds follow from those of the responses; responses that begin alike share a state,
which is estimated once. Of a state beyond the first so many the value is the reward of the response itself: the return
of the one continuation that there is.
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
    """Of a response: after how many tokens each of its steps ends, and the value of the state before it."""

    ends: tuple[int, ...]
    values: tuple[float, ...]


def check_can_value(task: Task, config: SearchConfig) -> None:
    if config.value_samples and isinstance(task, TakesTurns):
        raise ConfigError(
            f"search.value_samples must be 0 for task {task.name!r}, which answers back: what it would say to another "
            f"continuation is not known, got {config.value_samples}"
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
    """For each prompt the steps of its responses, all of which were sampled alike. `tell` hears of how many of how many
    states are done: there are many, and whoever waits may want to stop."""
    most = config.value_steps or None
    divided = [
        [_Divided(prompt, it, step_ends(scoring.task, generator.tokenizer, it), reward.value) for it, reward in pairs]
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
    found = dict(zip(states, means, strict=True))
    return [[Steps(it.ends, it.values(found, most)) for it in group] for group in divided]


def _means(scoring: Scoring, generator: Generator, config: SearchConfig, states: "Sequence[_State]") -> list[float]:
    """The mean reward of each state's continuations, which are generated and scored together."""
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
        [state.continued(it, generator.tokenizer) for it in group]
        for state, group in zip(states, continuations, strict=True)
    ]
    rewards = scoring.rewards([state.prompt for state in states], whole)
    return [fmean(reward.value for reward in group) for group in rewards]


@dataclass(frozen=True)
class _State:
    """What a response to a prompt is after so many tokens."""

    prompt: Prompt
    response: Response
    tokens: int

    @property
    def key(self) -> _Key:
        """The same for responses that begin alike."""
        return self.prompt.prompt_id, self.response.tokens[: self.tokens]

    @property
    def so_far(self) -> Prompt:
        return replace(self.prompt, tokens=self.prompt.tokens + self.response.tokens[: self.tokens])

    def seed(self, number: int) -> int:
        return continuation_seed(self.response.seed, self.tokens, number)

    def continued(self, continuation: Response, tokenizer: Any) -> Response:
        """The whole response that a continuation makes of it."""
        tokens = self.response.tokens[: self.tokens] + continuation.tokens
        return replace(
            continuation,
            tokens=tokens,
            logps=self.response.logps[: self.tokens] + continuation.logps,
            text=cast(str, tokenizer.decode(tokens, skip_special_tokens=True)),
        )


@dataclass(frozen=True)
class _Divided:
    """A response by its steps."""

    prompt: Prompt
    response: Response
    ends: tuple[int, ...]
    reward: float

    @property
    def states(self) -> list[_State]:
        """Before each step."""
        return [_State(self.prompt, self.response, tokens) for tokens in (0, *self.ends[:-1])]

    def values(self, found: Mapping[_Key, float], most: int | None) -> tuple[float, ...]:
        estimated = [found[state.key] for state in self.states[:most]]
        return (*estimated, *[self.reward] * (len(self.ends) - len(estimated)))
