"""Settings of searchers, and of the sampler that draws from what they have generated."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from tba.settings import Count, Positive, Reward, Share, Temperature, TopP, settings
from tba.types import Copies, Eligibility, Evict


@settings
class SamplingConfig:
    """Which trajectories a gradient step draws from the replay buffer."""

    recent_share: Share = 0.5
    """m: probability that a slot of the batch draws from the data that entered at the newest sync. Higher values train
    on fresher data."""
    inv_temp: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """The other slots draw responses with probability proportional to exp(inv_temp x reward). Higher values prefer high
    rewards; 0 draws uniformly."""
    capacity: Positive = 100
    """Maximum number of responses per prompt that can be drawn. The log keeps all responses."""
    copies: Copies = "newest"
    """Which of several identical responses to a prompt can be drawn. `newest`: the newest copy alone, so that a rare
    response is drawn as often as a frequent one. `all`: every copy, as often as it was generated; training on-policy
    needs this."""
    evict: Evict = "oldest"
    """Which responses make room when a prompt has more than `capacity`: the oldest, or those with the lowest reward.
    With `worst`, the newest responses to a prompt can be drawn as well, until newer ones enter the buffer."""
    max_age: Count | None = None
    """Maximum age, in gradient steps, of trajectories that are drawn. If fewer than a batch stay young enough until the
    next sync, the trainer waits for searchers. Unset, everything ever generated can be drawn."""
    mean_reward_between: tuple[Reward, Reward] | None = None
    """Draw only prompts whose drawable responses have a mean reward strictly between these two bounds. [0, 1] skips
    prompts that are always or never solved. A branch with no such prompt ignores the bounds. Unset, every prompt can be
    drawn."""
    sql: str = ""
    """Path of a file with SQL that replaces the built-in sampler."""

    @property
    def eligibility(self) -> Eligibility:
        return Eligibility(capacity=self.capacity, evict=self.evict, copies=self.copies, max_age=self.max_age)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.mean_reward_between and self.mean_reward_between[0] >= self.mean_reward_between[1]:
            raise ValueError(
                f"sampling.mean_reward_between must be [LOWER, HIGHER], with two different bounds, got "
                f"{list(self.mean_reward_between)}"
            )
        return self

    @model_validator(mode="after")
    def _the_best_can_grow_old(self) -> Self:
        if self.max_age is not None and self.evict == "worst":
            raise ValueError(
                f"sampling.evict must be 'oldest' where sampling.max_age is set ({self.max_age}), got 'worst': "
                "the best responses would keep their places even when they are too old to be drawn"
            )
        return self


@settings
class SearchConfig:
    """How searchers generate responses."""

    searchers: Count = 1
    """Number of searchers that generate at the same time. With 0 the run learns only from what `tba import` brings."""
    responses_per_prompt: Positive = 8
    """S: responses that a searcher generates each time it visits a prompt; at least K."""
    prompts_per_round: Positive = 8
    """Prompts that a searcher visits in one round. The responses of a round are stored as one shard."""
    open_rounds: Positive = 1
    """Number of rounds that a searcher works on at the same time. With more than 1, a shard takes the groups that
    finish first, and new requests fill the places of finished ones, so one long response delays only its own group."""
    rounds_per_version: Positive | None = None
    """Maximum number of rounds that a searcher starts with one version before it waits for a newer one. It limits what
    is generated and stored when training is slower than search. Unset, a searcher never waits."""
    temperature: Temperature = 1.0
    """Sampling temperature of generation, and of every log-probability in the loss."""
    top_p: TopP = 1.0
    """Nucleus sampling: generation samples from the most likely tokens that together have this probability. 1 samples
    from all tokens."""
    explore_share: Share = 0.0
    """Share of the rounds of a searcher that use another temperature, and independently of those that use another
    `top_p`. The paper uses 0.3."""
    explore_temperature: tuple[Temperature, Temperature] | None = None
    """Lowest and highest temperature of exploring rounds. Unset, from the temperature of search to 1.1 / 0.7 times
    that."""
    explore_top_p: TopP = 0.7
    """Lowest `top_p` of exploring rounds; the highest is 1."""
    max_prompt_tokens: Positive = 512
    """Maximum length of a prompt in tokens. Longer prompts are left out."""
    max_response_tokens: Positive = 512
    """Maximum length of a response in tokens, in search and in evaluations. Longer responses are cut off."""
    batch_responses: Positive = 512
    """Maximum number of responses generated in one batch. Higher is faster until memory runs out."""
    shuffle: bool = True
    """Whether prompts are visited in a random order that the seed determines. The code of the paper visits them in the
    order of the data."""
    remembered_rewards: Count = 0
    """Number of distinct responses whose rewards a searcher remembers instead of computing them again. Use it for tasks
    whose rewards are slow and always the same for the same response. 0 remembers none."""
    value_samples: Count = 0
    """Continuations that a searcher samples to estimate the value of each state within a response, for `vine-ppo` in
    this run or a fork of it; the VinePPO paper uses 9. More continuations give better estimates and cost more
    generation. 0 estimates no values."""
    value_steps: Count = 25
    """Maximum number of states of a response, from the prompt on, whose values are estimated. Later states get the
    reward of the response. 0 estimates all."""
    initial_fill: Positive = 500
    """Trajectories that must exist before the first gradient step; at least a batch. With `sync.lag`, a sync waits for
    its round instead."""
    prompts_from: str = ""
    """An earlier run, by name, path or URL. This run trains only on the prompts that meet `prompts_where` according to
    the log of that run. Prompts that the earlier run never visited are left out."""
    prompts_where: str = ""
    """SQL condition on the columns of the view `difficulty` of the earlier run, such as `solve_rate between 0.1 and
    0.9`."""

    @model_validator(mode="after")
    def _prompts_are_chosen_by_a_run_and_a_condition(self) -> Self:
        names = ("prompts_from", "prompts_where")
        for name, other in (names, names[::-1]):
            if (value := getattr(self, other)) and not getattr(self, name):
                raise ValueError(f"search.{name} must be set where search.{other} is set ({value!r}), got ''")
        return self

    @property
    def explored_temperatures(self) -> tuple[float, float]:
        """Lowest and highest temperature of exploring rounds."""
        return self.explore_temperature or (self.temperature, self.temperature * 1.1 / 0.7)

    @model_validator(mode="after")
    def _exploration_applies(self) -> Self:
        for name in ("explore_temperature", "explore_top_p"):
            value = getattr(self, name)
            if not self.explore_share and value != getattr(type(self), name):
                raise ValueError(f"search.{name} does not apply where search.explore_share is 0, got {value}")
        if self.explore_temperature and self.explore_temperature[0] > self.explore_temperature[1]:
            raise ValueError(
                f"search.explore_temperature must be [LOWEST, HIGHEST], got {list(self.explore_temperature)}"
            )
        return self
