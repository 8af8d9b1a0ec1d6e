"""Settings of searchers, and of the sampler that draws what they found."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from tba.config.fields import Count as Count
from tba.config.fields import Positive as Positive
from tba.config.fields import Reward as Reward
from tba.config.fields import Share as Share
from tba.config.fields import Temperature as Temperature
from tba.config.fields import TopP as TopP
from tba.config.fields import settings as settings
from tba.types import Copies, Eligibility, Evict


@settings
class SamplingConfig:
    """Which trajectories a step learns from."""

    recent_share: Share = 0.5
    """m: probability that a slot takes a prompt, and responses, that entered at the newest sync."""
    inv_temp: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """The other slots draw with probability proportional to exp(inv_temp x reward); 0 is uniform."""
    capacity: Positive = 100
    """Responses per prompt that can still be drawn. The log keeps all."""
    copies: Copies = "newest"
    """Of responses to a prompt that say the same: the newest alone can be drawn, so that what is rare comes as often as
    what is frequent, or all can, as often as they were generated. On policy it takes all of them."""
    evict: Evict = "oldest"
    """Which go first where there are more: the oldest, or the worst, those with the least reward. Then what the newest
    record of a prompt brought can be drawn besides, until the next brings others."""
    max_age: Count | None = None
    """Steps: what is older is not drawn. Where less than a batch is young enough for all steps up to the next sync, the
    trainer waits for searchers. Unset, everything ever generated can be drawn."""
    mean_reward_between: tuple[Reward, Reward] | None = None
    """Drawn are only prompts whose responses, those that can still be drawn, have a mean reward strictly between these
    two; of a branch without any, all. So [0, 1] passes over what is always or never right. Unset, nothing."""
    sql: str = ""
    """A file of SQL to draw with instead of the built-in sampler."""

    @property
    def eligibility(self) -> Eligibility:
        return Eligibility(capacity=self.capacity, evict=self.evict, copies=self.copies, max_age=self.max_age)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.mean_reward_between and self.mean_reward_between[0] >= self.mean_reward_between[1]:
            raise ValueError(
                f"sampling.mean_reward_between must be the lower and the higher one, got "
                f"{list(self.mean_reward_between)}"
            )
        return self

    @model_validator(mode="after")
    def _the_best_can_grow_old(self) -> Self:
        if self.max_age is not None and self.evict == "worst":
            raise ValueError(
                f"sampling.evict must be 'oldest' where sampling.max_age is set ({self.max_age}): the best would keep "
                "their room when they are too old to be drawn, got 'worst'"
            )
        return self


@settings
class SearchConfig:
    """How searchers generate."""

    searchers: Count = 1
    """That generate at once; with 0 a run learns from what `tba import` brings alone."""
    responses_per_prompt: Positive = 8
    """S: responses per prompt and visit, at least K."""
    prompts_per_round: Positive = 8
    """What a searcher asks in one pass; what comes of it is one shard."""
    open_rounds: Positive = 1
    """Rounds of a searcher in the making at once, in a row. With more than 1 a shard takes the groups that end first,
    so that a long response holds back its own group, not a shard, and the places of what has ended are filled."""
    rounds_per_version: Positive | None = None
    """Most rounds that a searcher begins with one version before it waits for the next: a bound on what is generated,
    and stored, where training is slower than search; unset, it never waits."""
    temperature: Temperature = 1.0
    """Of generation, and of every log-probability in the loss."""
    top_p: TopP = 1.0
    """Of generation: tokens are sampled from the likeliest that have so much probability together; 1 is all."""
    explore_share: Share = 0.0
    """Share of a searcher's rounds at another temperature, and, independently, of those with another `top_p`; the
    paper's is 0.3."""
    explore_temperature: tuple[Temperature, Temperature] | None = None
    """Between which two the other temperature lies; unset, between that of search and 1.1 / 0.7 of it."""
    explore_top_p: TopP = 0.7
    """Between this and 1 lies the other `top_p`."""
    max_prompt_tokens: Positive = 512
    """Prompts that are longer are left out."""
    max_response_tokens: Positive = 512
    """What has not ended by then is cut off, in search and in evaluations."""
    batch_responses: Positive = 512
    """Responses generated side by side."""
    shuffle: bool = True
    """Visit prompts in a seeded order; the paper's code visited them in the order of the data."""
    remembered_rewards: Count = 0
    """Of so many distinct responses a searcher remembers the reward instead of asking for it again: for tasks whose
    rewards cost more than that, and where the same response is always worth the same."""
    value_samples: Count = 0
    """Continuations from which the value of each state within a response is estimated, for `vine-ppo`, whose paper has
    9, in this run or a fork of it; 0 leaves them out."""
    value_steps: Count = 25
    """Of how many states of a response, from the prompt's on; those beyond get the response's own reward. 0 is all."""
    initial_fill: Positive = 500
    """Trajectories that must exist before the first step: a batch at least. Where searchers and trainer go in step, a
    sync waits for its round instead."""
    prompts_from: str = ""
    """An earlier run, by name, path or URL: asked are only the prompts to train on of which its log fulfils
    `prompts_where`. What that run does not have is left out."""
    prompts_where: str = ""
    """A condition in SQL on the columns of its view `difficulty`, such as `solve_rate between 0.1 and 0.9`."""

    @model_validator(mode="after")
    def _prompts_are_chosen_by_a_run_and_a_condition(self) -> Self:
        names = ("prompts_from", "prompts_where")
        for name, other in (names, names[::-1]):
            if (given := getattr(self, other)) and not getattr(self, name):
                raise ValueError(f"search.{name} must be set where search.{other} is ({given!r}), got ''")
        return self

    @property
    def explored_temperatures(self) -> tuple[float, float]:
        """Between which the temperatures lie that rounds explore."""
        return self.explore_temperature or (self.temperature, self.temperature * 1.1 / 0.7)

    @model_validator(mode="after")
    def _exploration_applies(self) -> Self:
        for name in ("explore_temperature", "explore_top_p"):
            found = getattr(self, name)
            if not self.explore_share and found != getattr(type(self), name):
                raise ValueError(f"search.{name} does not apply where search.explore_share is 0, got {found}")
        if self.explore_temperature and self.explore_temperature[0] > self.explore_temperature[1]:
            raise ValueError(
                f"search.explore_temperature must be the lower and the higher one, got {list(self.explore_temperature)}"
            )
        return self
