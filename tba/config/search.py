"""Settings of searchers, and of the sampler that draws from what they have generated."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.settings import Count, Positive, Reward, Share, Temperature, TopP, settings
from tba.types import Copies, Eligibility, Evict


@settings
class SamplingConfig:
    """Which trajectories a gradient step draws from the replay buffer."""

    recent_share: Share = 0.5
    """m: probability that a slot of the batch is drawn from the newest data, which entered at the newest sync. A slot
    is a prompt with its `training.responses_per_prompt` responses. Other slots are drawn from all data. Higher values
    train on fresher data."""
    inv_temp: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """How strongly slots that are drawn from all data prefer high rewards. Each of these slots draws among the
    responses to its prompt, with probability proportional to exp(inv_temp x reward). Higher values prefer high rewards
    more; 0 draws uniformly."""
    capacity: Positive = 100
    """Maximum number of responses per prompt that can be drawn; `evict` says which ones, and with `worst` the newest
    can exceed this number. Higher values train on more different, and older, responses. The log keeps all responses."""
    copies: Copies = "newest"
    """Which of several identical responses to a prompt can be drawn. `newest`: the newest copy alone, so that a rare
    response is drawn as often as a frequent one. `all`: every copy, as often as it was generated; training on-policy
    needs this."""
    evict: Evict = "oldest"
    """Which responses can no longer be drawn when a prompt has more than `capacity` responses. `oldest`: the oldest.
    `worst`: those with the lowest reward. The responses that the last sync brought to a prompt can all be drawn, even
    beyond `capacity`, until another sync brings responses to this prompt."""
    max_age: Count | None = None
    """Maximum age of trajectories that are drawn: the number of gradient steps since the version that generated them.
    Lower values train on fresher data. If fewer trajectories than a batch would stay young enough until the next sync,
    the trainer waits for searchers. Unset, age is not limited."""
    mean_reward_between: tuple[Reward, Reward] | None = None
    """Draw only prompts with a mean reward strictly between these two bounds. The mean is over the prompt's responses
    that can still be drawn. With rewards of 0 and 1, [0, 1] skips prompts that are always or never solved. The two
    parts of a batch, from the newest data and from all data, are treated separately: where no prompt is within the
    bounds, that part ignores them. Unset, every prompt can be drawn."""
    sql: str = ""
    """Path of a file with SQL that replaces the built-in sampler. Empty uses the built-in sampler."""

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
    """S: number of responses that a searcher generates each time it visits a prompt; at least
    `training.responses_per_prompt`."""
    prompts_per_round: Positive = 8
    """Number of prompts that a searcher visits in one round. A shard holds the responses to this many prompts, or
    fewer. Higher values store fewer and larger shards, whose data is older when it is drawn."""
    open_rounds: Positive = 1
    """Number of rounds that a searcher works on at the same time. With 1, the next round begins when the longest
    response of the round has finished. With more, new requests take the places of finished ones at once, and a shard
    takes the prompts whose responses have finished first: a long response delays only the other responses to its
    prompt."""
    rounds_per_version: Positive | None = None
    """Maximum number of rounds that a searcher starts with one version before it waits for a newer one. This limits
    what is generated and stored when training is slower than search. Unset, there is no limit."""
    temperature: Temperature = 1.0
    """Sampling temperature of generation, and of every log-probability in the loss. Higher values generate more diverse
    responses."""
    top_p: TopP = 1.0
    """Nucleus sampling: generation samples from the most likely tokens that together have at least this probability.
    Higher values are more diverse. 1 samples from all tokens."""
    explore_share: Share = 0.0
    """Probability that a round explores with another temperature, and, independently, that it explores with another
    `top_p`. Higher values generate more diverse data. The paper uses 0.3."""
    explore_temperature: tuple[Temperature, Temperature] | None = None
    """Lowest and highest temperature of rounds that explore with another temperature, which is drawn uniformly in
    between. Unset, they are `search.temperature` and 1.1 / 0.7 times `search.temperature`."""
    explore_top_p: TopP = 0.7
    """Lowest `top_p` of rounds that explore with another `top_p`, which is drawn uniformly between this value and 1."""
    max_prompt_tokens: Positive = 512
    """Maximum length of a prompt in tokens. Longer prompts are left out."""
    max_response_tokens: Positive = 512
    """Maximum length of a response in tokens, in search and in evaluations. Longer responses are cut off. In a task
    with turns, all turns together count, those of the environment included."""
    batch_responses: Positive = 512
    """Maximum number of responses that a searcher or the evaluator generates in one batch. Higher is faster until
    memory runs out."""
    shuffle: bool = True
    """Whether each pass over the prompts uses a new random order, which the seed determines. `false` uses the order of
    the data, as the code of the paper does."""
    reference_logps: Literal["always", "needed"] = "always"
    """When searchers compute and store the log-probability of each response token under the reference. `always`: in
    every run. `needed`, which all presets use: only if the gradients of the objective depend on it. Otherwise searchers
    do not load the reference, `log_ratio_mean` and `ref_logp` are unknown, and a fork cannot change to an objective
    that needs the reference. A run that was stored without this setting always stores them."""
    remembered_rewards: Count = 0
    """Number of distinct responses whose rewards a searcher remembers instead of computing them again. Use it for tasks
    whose rewards are slow and always the same for the same response. 0 remembers none."""
    value_samples: Count = 0
    """Number of continuations sampled to estimate the value of each state of a response. A state is the prompt and the
    first reasoning steps of the response, as the task divides it. Must be above 0 if this run, or a later fork of it,
    uses `vine-ppo`; the VinePPO paper uses 9. Higher values give better estimates and cost more generation. 0 estimates
    none."""
    value_steps: Count = 25
    """Maximum number of states of a response, from the prompt on, whose values are estimated (see `value_samples`). The
    value of later states is set to the reward of the response. Higher values cost more generation. 0 estimates all."""
    initial_fill: Positive = 500
    """Number of trajectories that must have arrived before the first gradient step. Must be at least a batch:
    `training.prompts_per_step` x `training.responses_per_prompt`. Higher values start later. With `sync.lag` this
    setting is not used: the trainer waits for one round of every searcher before each sync."""
    prompts_from: str = ""
    """An earlier run, by name, path or URL. This run trains only on those of its own prompts that meet `prompts_where`
    in the log of the earlier run. Prompts that the earlier run never visited are left out. Empty trains on all
    prompts."""
    prompts_where: str = ""
    """SQL condition on the columns of the view `difficulty` of the run in `prompts_from`, such as `solve_rate between
    0.1 and 0.9`. Only prompts that meet it are used. Set `prompts_from` and `prompts_where` together or leave both
    empty."""

    @model_validator(mode="after")
    def _prompts_are_chosen_by_a_run_and_a_condition(self) -> Self:
        names = ("prompts_from", "prompts_where")
        for name, other in (names, names[::-1]):
            if (value := getattr(self, other)) and not getattr(self, name):
                raise ValueError(f"search.{name} must be set where search.{other} is set ({value!r}), got ''")
        return self

    @property
    def explored_temperatures(self) -> tuple[float, float]:
        """Lowest and highest temperature of rounds that explore with another temperature."""
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
