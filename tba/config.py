"""Settings of a run: frozen, checked before anything starts, stored beside the run as JSON.

Numbers that follow from others are properties. `replace({"training.steps": 10})` changes them by dotted keys. Every
refusal names the field, the value and the range.
Symbols in the comments are the paper's: B prompts per step, K responses each, S responses per prompt and visit,
k steps per sync, m the share of the newest data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from tba.errors import ConfigError
from tba.types import Copies, CorrectionKind, Eligibility, Evict, Level, Normaliser, Penalty

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def settings(cls: type[T]) -> type[T]:
    """A section of the settings: frozen, by keyword, unknown keys and non-finite numbers refused."""
    strict = ConfigDict(extra="forbid", allow_inf_nan=False)
    return dataclass(config=strict, frozen=True, kw_only=True)(cls)  # pyright: ignore[reportReturnType]


Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Patience = Annotated[float, Field(ge=0, le=1e9)]  # in seconds; 0 is without end
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=1e-9, le=1e9)]  # rewards are divided by it, and the quotients squared in float32
Reward = Annotated[float, Field(ge=-1e300, le=1e300)]
Tempering = Annotated[float, Field(ge=1e-3, le=1e3)]
Temperature = Annotated[float, Field(ge=0.001, le=10)]
TopP = Annotated[float, Field(gt=0, le=1)]


@settings
class TaskConfig:
    """What is asked and how answers are rewarded."""

    name: str = "quickstart"
    """One of ours, the name of an entry point `tba.tasks` of an installed package, or the path of a class, such as
    `package.module:Class`."""
    train: str = ""
    """Rows to learn from: JSON lines or Parquet at a path or URL, whose last part may have a `*` for several files;
    empty takes the task's own."""
    test: str = ""
    """Rows to evaluate on, likewise."""
    rule: str = ""
    """How an answer is read out of a response, where the task has several ways; empty takes its default."""
    template: str = ""
    """Which wording of the prompt, where the task has several; empty takes its default."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Whatever else a task can be told, by names of its own."""


@settings
class ModelConfig:
    """The policy before training; it is also the reference, at first."""

    path: str = ""
    """A folder, an `s3://` URL or a hub name; empty lets the task make its own small base policy."""
    revision: str = "main"
    """Of a model of the hub: a branch, a tag or a commit."""
    trust_remote_code: bool = False
    """Whether a model may bring code of its own, which every role then runs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's weights and optimizer."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of published versions, which searchers generate with."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""
    threads: Count = 1
    """CPU threads of each role; 0 leaves them to torch."""
    lora_rank: Annotated[int, Field(ge=0, le=512)] = 0
    """Of adapters that are trained, and published, in place of the weights, which stay as they are; 0 trains those."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """What an adapter adds is multiplied by lora_alpha / lora_rank; unset, by 2."""
    lora_targets: Annotated[str, Field(min_length=1)] = "all-linear"
    """Layers that have an adapter: `all-linear` is all inside the model; else names with commas between them, such as
    `q_proj,v_proj`."""

    @model_validator(mode="after")
    def _settings_of_lora_apply(self) -> Self:
        for name in ("lora_alpha", "lora_targets"):
            found = getattr(self, name)
            if not self.lora_rank and found != getattr(type(self), name):
                raise ValueError(f"model.{name} does not apply where model.lora_rank is 0, got {found!r}")
        if self.lora_rank and self.publish_dtype != self.dtype:
            raise ValueError(
                f"model.publish_dtype must be model.dtype ({self.dtype!r}) where model.lora_rank is set: adapters are "
                f"published as they are trained, and their base is one for all roles, got {self.publish_dtype!r}"
            )
        return self

    @property
    def peft_alpha(self) -> float:
        """As peft takes it."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha


@settings
class EngineConfig:
    """What generates responses, for searchers and the evaluator."""

    name: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto` takes vLLM on a GPU, where it is installed."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of a GPU's memory that vLLM takes; the reference, and the models by which a task rewards, lie beside it. Unset,
    0.6 divided by the number of roles that share the GPU."""
    cache_gigabytes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of vLLM's keys and values; unset, on a GPU what is left of its share, on a CPU 1."""
    tensor_parallel: Positive = 1
    """GPUs that one engine of vLLM is spread over."""
    in_flight: Literal["finish", "update"] = "finish"
    """What becomes of responses in the making when a version appears: a round is finished by the version that began
    it, or the version is adopted at once and they go on with its weights. Of adapters vLLM serves several at once: each
    response ends with the one that it began with, and others begin with the newest."""
    compile: bool = True
    """Whether vLLM, on a GPU, compiles the model and records CUDA graphs: faster steps, and a slower start."""

    @model_validator(mode="after")
    def _settings_of_vllm_apply(self) -> Self:
        for name in ("memory_fraction", "cache_gigabytes", "tensor_parallel", "compile"):
            found = getattr(self, name)
            if self.name == "transformers" and found != getattr(type(self), name):
                raise ValueError(f"engine.{name} does not apply where engine.name is 'transformers', got {found!r}")
        return self

    def fraction(self, roles: int = 1) -> float:
        """Of a GPU's memory that an engine takes where so many roles share it. Each role has an equal part of it, the
        trainer as well as those with an engine, and leaves 0.6 of its part to that: the engines of as many roles take
        no more than 0.6 together."""
        return self.memory_fraction or 0.6 / roles


ObjectiveName = Literal[
    "trajectory-balance", "tba-prime", "reinforce", "rloo", "proximal-rloo", "grpo", "dr-grpo", "online-dpo", "kimi",
    "oapl", "ppo", "vine-ppo",
]  # fmt: skip
OptimizerName = Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-on-host"]
_GRADIENTS = ("tba-prime", "reinforce", "rloo", "proximal-rloo", "grpo", "dr-grpo")
_APPLIES: Mapping[str, Sequence[ObjectiveName]] = {
    "log_z": ("trajectory-balance",),
    "target_temperature_start": ("trajectory-balance",),
    "target_temperature_steps": ("trajectory-balance",),
    "reference_temperature_end": ("trajectory-balance",),
    "reference_temperature_steps": ("trajectory-balance",),
    "log_z_learning_rate": ("trajectory-balance",),
    "correction": (*_GRADIENTS, "ppo", "vine-ppo"),
    "correction_level": _GRADIENTS,
    "normaliser": (*_GRADIENTS, "ppo", "vine-ppo"),
    "penalty": ("reinforce", "rloo", "proximal-rloo", "grpo", "dr-grpo", "ppo", "vine-ppo"),
    "centre": ("tba-prime",),
    "anchor": ("trajectory-balance", "kimi", "oapl"),
    "value_beta": ("oapl",),
    "discount": ("ppo",),
    "gae_decay": ("ppo",),
    "value_share": ("ppo",),
    "value_learning_rate": ("ppo",),
}
"""To which objectives a setting applies; for others it must be left as it is."""
_CORRECTIONS: Mapping[str, CorrectionKind] = {
    "tba-prime": "cap", "proximal-rloo": "clip", "grpo": "clip", "dr-grpo": "clip", "ppo": "clip", "vine-ppo": "clip",
}  # fmt: skip
"""Of the objectives that correct unless they are told otherwise: how."""
_USED_BY: Mapping[str, Sequence[CorrectionKind]] = {
    "correction_level": ("clip", "cap", "truncate", "cispo", "mask", "decoupled"),
    "clip_low": ("clip", "cispo", "decoupled"),
    "clip_high": ("clip", "cispo", "decoupled"),
    "ratio_cap": ("cap", "truncate", "mask"),
    "prox_share": ("decoupled",),
}
"""Which corrections a setting is for; with others it must be left as it is."""


@settings
class ObjectiveConfig:
    """The loss, the temperature beta of its target, and what counts as part of a response. `own` leaves a choice to the
    objective; docs/objectives.md has the formulas."""

    name: ObjectiveName = "trajectory-balance"
    """How drawn responses change the policy."""
    beta_start: Beta = 0.05
    """At step 1."""
    beta_end: Beta = 0.05
    """From `beta_stop` on. To change a beta that stays as it is, set both."""
    beta_target: Positive = 1
    """The step towards which beta is drawn in a line from `beta_start` to `beta_end`."""
    beta_stop: Positive = 1
    """From this step on beta is `beta_end`; before `beta_target` it is a jump."""
    target_temperature_start: Tempering = 1.0
    """T: what log pi_ref and reward / beta are both divided by at step 1."""
    target_temperature_steps: Positive = 1
    """Steps in which T goes to 1 in a line."""
    reference_temperature_end: Tempering = 1.0
    """Gamma: what log pi_ref alone is divided by beside, in the end."""
    reference_temperature_steps: Positive = 1
    """Steps in which gamma gets there from 1, in a line."""
    include_eos: bool = True
    """Whether a generated end token is part of the response; the paper's GSM8K runs left it out."""
    reference_reset: Count = 0
    """Steps between resets of the reference to the policy; 0 never."""
    reset_optimizer: bool = False
    """Whether the optimizer forgets at a reset what it has learned of gradients."""
    reference_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of itself that the reference keeps at every step, while the rest is the policy's; 0 lets it stay."""
    log_z: Literal["group", "leave-one-out", "learned"] = "group"
    """Of which responses log Z is the mean: the whole group, or for each response the others; or whether it is learned
    beside the policy."""
    log_z_learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """Of a learned log Z at its peak; the schedule is that of training."""
    correction: Literal["own"] | CorrectionKind = "own"
    """What makes up for data that another policy sampled."""
    correction_level: Literal["own"] | Level = "own"
    """Of what its ratio is."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How far below 1 a ratio is clipped."""
    clip_high: Annotated[float, Field(ge=0, le=1e9)] = 0.2
    """How far above 1."""
    ratio_cap: Annotated[float, Field(ge=1, le=1e9)] = 8.0
    """Of the ratio where it is capped, truncated or masked."""
    prox_share: Share = 0.5
    """Of a decoupled correction: how far its proximal policy lies from what sampled towards the policy."""
    normaliser: Literal["own"] | Normaliser = "own"
    """What the sum over a response's tokens is divided by."""
    penalty: Literal["own"] | Penalty = "own"
    """Where leaving the reference costs."""
    centre: Literal["policy", "behaviour"] = "policy"
    """At which policy `tba-prime` takes the mean log-ratio of a group; the paper's runs: at what sampled it."""
    anchor: Literal["own", "reference", "behaviour"] = "own"
    """To which policy trajectory balance, or a regression, takes its log-ratio: the reference, or what sampled each
    response."""
    value_beta: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Temperature at which `oapl` averages a group's rewards; 0 takes beta."""
    discount: Share = 1.0
    """What a reward counts in `ppo` one token before it; 1 is all of it."""
    gae_decay: Share = 0.95
    """Lambda: how far they look beyond the next value; 1 up to the reward."""
    value_share: Annotated[float, Field(gt=0, le=1e3)] = 0.1
    """What the value loss counts beside that of the policy."""
    value_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of the value model at its peak, on the schedule of training; 0 takes `training.learning_rate`."""

    @property
    def tempers(self) -> bool:
        """Whether log pi_ref ever counts more or less than once in the target."""
        return self.target_temperature_start != 1 or self.reference_temperature_end != 1

    @property
    def correction_kind(self) -> CorrectionKind:
        """The objective's own correction, or what is chosen in its place."""
        return _CORRECTIONS.get(self.name, "none") if self.correction == "own" else self.correction

    @property
    def needs_tokens(self) -> bool:
        """Whether it may look at single tokens under the reference, and as they were sampled."""
        match self.name:
            case "online-dpo":
                return False
            case "reinforce" | "rloo":
                return self.correction_kind != "none" or self.penalty == "loss"
            case "trajectory-balance" | "kimi":
                return self.anchor == "behaviour"
            case _:
                return True

    @property
    def needs_values(self) -> bool:
        """Whether it takes advantages from values that searchers store of the states within responses."""
        return self.name == "vine-ppo"

    @model_validator(mode="after")
    def _settings_apply(self) -> Self:
        for name, objectives in _APPLIES.items():
            found = getattr(self, name)
            if self.name not in objectives and found != getattr(type(self), name):
                raise ValueError(f"objective.{name} does not apply to {self.name!r}, got {found!r}")
        for name, corrections in _USED_BY.items():
            found = getattr(self, name)
            if self.correction_kind not in corrections and found != getattr(type(self), name):
                raise ValueError(
                    f"objective.{name} does not apply where objective.correction is {self.correction_kind!r}, got "
                    f"{found!r}"
                )
        for of, end in (("target_temperature", "start"), ("reference_temperature", "end")):
            if getattr(self, f"{of}_{end}") == 1 and (steps := getattr(self, f"{of}_steps")) != 1:
                raise ValueError(f"objective.{of}_steps does not apply where objective.{of}_{end} is 1, got {steps}")
        if self.anchor == "behaviour" and self.name == "trajectory-balance":
            self._have_no_reference()
        if self.name == "vine-ppo" and self.penalty == "reward":
            raise ValueError(
                "objective.penalty must be 'loss' or 'none' for 'vine-ppo', whose values are of the task's rewards "
                "alone, got 'reward'"
            )
        if self.reference_reset and self.reference_decay:
            raise ValueError(
                f"objective.reference_decay must be 0 where the reference is reset (objective.reference_reset = "
                f"{self.reference_reset}), got {self.reference_decay}"
            )
        if self.log_z != "learned" and self.log_z_learning_rate != type(self).log_z_learning_rate:
            raise ValueError(
                f"objective.log_z_learning_rate does not apply where objective.log_z is {self.log_z!r}, "
                f"got {self.log_z_learning_rate}"
            )
        if self.reset_optimizer and not self.reference_reset:
            raise ValueError("objective.reset_optimizer does not apply where objective.reference_reset is 0")
        return self

    def _have_no_reference(self) -> None:
        if self.log_z == "learned":
            raise ValueError(
                "objective.log_z must be 'group' or 'leave-one-out' where objective.anchor is 'behaviour', got "
                "'learned'"
            )
        for name in ("reference_reset", "reference_decay", "target_temperature_start", "reference_temperature_end"):
            if (found := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(f"objective.{name} does not apply where objective.anchor is 'behaviour', got {found}")


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


@settings
class TrainingConfig:
    """How the trainer steps."""

    steps: Positive = 100
    """Gradient steps of the run."""
    prompts_per_step: Positive = 8
    """B: slots of a batch."""
    responses_per_prompt: Annotated[int, Field(ge=2)] = 8
    """K: responses of a slot; the loss compares them with each other, so one alone teaches nothing."""
    groups_per_micro_batch: Positive | None = None
    """Slots whose gradients are computed at once; unset, and the next too, 8. A slot is never split."""
    tokens_per_micro_batch: Positive | None = None
    """Instead: as many whole slots as a model reads in so many tokens. One that takes more is read in several pieces,
    twice, for the same gradients; only a response of more tokens is still read at once."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that the trainer is spread over, on one machine, each with a GPU of its own where there are any: of
    weights, gradients and optimizer each holds its part, and it learns from its part of a batch."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Of the trainer's products of matrices where `model.dtype` is float32: with bfloat16 the weights, their gradients,
    the optimizer, log-softmax and sums stay in float32. `auto`, which all presets have, is bfloat16 on a GPU, float32
    on a CPU. A run that was stored without this setting has float32. Weights in bfloat16 are computed with as they are.
    """
    checkpoint_activations: bool = False
    """Of each layer the trainer keeps only what it was given, and computes the rest again when gradients ask for it:
    a third more time, for the same gradients."""
    optimizer: OptimizerName = "adamw"
    """AdamW: torch's own, whose kernels are fused on a GPU, and with `adamw-fused` on a CPU too, for other last digits;
    `adamw-8bit` keeps the moments in 8 bits a number, `adamw-on-host` keeps them in main memory and computes there."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """At its peak."""
    schedule: Literal["constant", "linear", "warmup-stable-decay"] = "constant"
    """Of the learning rate: as it is, in a line to 0 at the last step, or up, level and down as a cosine."""
    warmup_steps: Count = 0
    """Of any schedule: the learning rate rises in a line to its peak."""
    stable_steps: Count | None = None
    """Of warmup-stable-decay: steps at the peak; unset, all that warm-up and decay leave of `steps`."""
    decay_steps: Count = 0
    """Of warmup-stable-decay: steps from the peak to 0. A run that ends before them stops on the way down."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of the first moment; 0 does without."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Of the second moment."""
    adam_eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Beside the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Share of a weight that a learning rate of 1 would take away at each step."""
    clip_norm: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Largest gradient norm; 0 leaves gradients alone, as the paper does."""

    @model_validator(mode="after")
    def _micro_batches_are_of_groups_or_of_tokens(self) -> Self:
        if self.tokens_per_micro_batch is not None and self.groups_per_micro_batch is not None:
            raise ValueError(
                f"training.groups_per_micro_batch must be null where training.tokens_per_micro_batch "
                f"({self.tokens_per_micro_batch}) says what a micro-batch is, got {self.groups_per_micro_batch}"
            )
        return self

    @property
    def most_groups(self) -> int | None:
        """Slots of a micro-batch, unless tokens say how many."""
        if self.tokens_per_micro_batch is not None:
            return None
        return self.groups_per_micro_batch or min(8, self.prompts_per_step)

    @property
    def peak_steps(self) -> int:
        """Steps at the peak of warmup-stable-decay."""
        if self.stable_steps is not None:
            return self.stable_steps
        return max(0, self.steps - self.warmup_steps - self.decay_steps)


def same_moments(one: OptimizerName, other: OptimizerName) -> bool:
    """Whether one optimizer goes on with what the other has stored."""
    return (one == "adamw-8bit") == (other == "adamw-8bit")


@settings
class SyncConfig:
    """How often the two sides meet, and what is kept of it."""

    every: Positive = 2
    """k: steps between syncs."""
    lag: Annotated[int, Field(ge=0, le=10**6)] | None = None
    """Unset, nobody waits for anybody. Otherwise searchers and trainer go in step: after each sync the trainer learns
    from one more round of every searcher, generated by the version that is so many syncs older; 0 is synchronous."""
    checkpoint_every: Positive = 5
    """Syncs between checkpoints."""
    keep_versions: Annotated[int, Field(ge=2)] = 4
    """The newest; those that are due for evaluation, and the first, stay besides."""
    whole_every: Positive = 1
    """Each so-manyth version is stored whole, those between as their difference from the last that is, where that is
    less than half. Worth it where searchers fetch bfloat16 versions of small learning rates over a network."""
    keep_checkpoints: Annotated[int, Field(ge=2, le=10**9)] = 2
    """The newest."""


@settings
class EvaluationConfig:
    """Which versions are scored, and how; docs/evaluation.md has the formulas."""

    every: Positive = 10
    """Syncs between evaluated versions; the first and the last are always evaluated."""
    prompts: Positive = 1319
    """At most this many held-out prompts."""
    samples: Count = 0
    """Sampled responses per prompt, beside the greedy one."""
    temperature: Temperature | None = None
    """Of sampled responses; unset, that of search."""
    top_p: TopP | None = None
    """Likewise."""
    pass_at: tuple[Positive, ...] = ()
    """The k of every pass@k that the sampled responses are to give; at most `samples`."""
    solved_at: float = 1.0
    """The reward from which on a response counts as right in pass@k."""

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"evaluation.pass_at must name each k once, got {list(self.pass_at)}")
        if max(self.pass_at, default=0) > self.samples:
            raise ValueError(
                f"evaluation.pass_at must be at most evaluation.samples ({self.samples}), got {list(self.pass_at)}"
            )
        for name in ("temperature", "top_p"):
            if not self.samples and (found := getattr(self, name)) is not None:
                raise ValueError(f"evaluation.{name} does not apply where evaluation.samples is 0, got {found}")
        if not self.pass_at and self.solved_at != type(self).solved_at:
            raise ValueError(
                f"evaluation.solved_at does not apply where evaluation.pass_at is empty, got {self.solved_at}"
            )
        return self


@settings
class LimitsConfig:
    """Every wait has a deadline, and what is kept at hand has a size; these are they."""

    data_deadline: Seconds = 1800.0
    """For the trainer to see its initial fill, and a searcher its first version, or, with `search.rounds_per_version`,
    the next; where they go in step, for each round and version that the other side owes; and for an answer of the
    trainer's reader, which has 2 minutes at least."""
    store_deadline: Seconds = 60.0
    """For one request to the object store, retries included."""
    lease_every: Seconds = 2.0
    """Between two signs of life of a role."""
    silent_after: Seconds = 15.0
    """A role whose lease has not moved for this long is reported, and restarted where that is possible."""
    orphan_after: Seconds = 600.0
    """A role that sees no supervisor for this long makes a checkpoint and stops."""
    stop_grace: Seconds = 60.0
    """The shortest time that a role has to stop in order before it is ended by force. Raise it if roles are ended by
    force while they still store something. A role that measures that it needs longer gets twice the time that it
    measures, and again as long as it makes progress, up to four times that in all. A limit that somebody else sets, as
    Prefect does, always counts."""
    max_restarts: Count = 5
    """Of one role within `restart_window`; one more fails the run."""
    restart_window: Seconds = 600.0
    """For `max_restarts`."""
    skipped_steps: Count = 10
    """Steps in a row, of one life of the trainer, that may update nothing because their loss or gradient is not finite;
    one more fails the run."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Of trajectories that the trainer keeps in memory, beside the index of its replay buffer; others are read again
    when they are drawn."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 32.0
    """Of shards of remote runs that are kept on this machine's disk, under `$TBA_CACHE`; 0 keeps none."""
    draw_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads that draw batches, beside those of the gradient step; what is drawn does not depend on them."""


@settings
class AlarmsConfig:
    """What is told as soon as it goes wrong, in events when it begins and when it is over; 0 leaves an alarm out."""

    late_after: Patience = 8.0
    """For the lease of a role that lives: seconds without a sign of it."""
    stalled_after: Patience = 300.0
    """For the trainer to take a step, and for a searcher to append a shard."""
    adopted_within: Patience = 300.0
    """For a searcher to take a version once a newer one than its own is published."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Left on any disk that a role writes to."""
    window: Positive = 20
    """Steps that the next two look back on."""
    reward_lost: Share = 0.5
    """Of what the mean reward of batches had gained at its best; less than its steps differ among each other, or than a
    tenth of it, is no loss."""
    equal_rewards: Share = 0.95
    """Of groups whose responses all have the same reward."""
    log_ratio: Annotated[float, Field(ge=0, le=1e6)] = 5.0
    """log π − log π_ref of a step's responses, in nats a token and without its sign."""
    mismatch: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """How far an engine's log-probabilities are from the trainer's, in nats a response."""


@settings
class StartConfig:
    """Where a run begins. `tba fork` sets it; a run that is no fork begins at the start."""

    sync: Count = 0
    """The last sync that a fork shares with its parent."""
    step: Count = 0
    """The step that sync follows: the fork's own first step is the next."""


@settings
class MetricsConfig:
    """What is told elsewhere; views, `tba watch` and the report need none of it."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Whether curves go to Weights & Biases too: at once, or into files to send later."""
    wandb_project: str = "tba"
    """Under which name there."""


@settings
class Config:
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything random."""
    task: TaskConfig = Field(default_factory=TaskConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    search: SearchConfig = Field(default_factory=SearchConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    start: StartConfig = Field(default_factory=StartConfig)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        search, training, sync, objective = self.search, self.training, self.sync, self.objective
        to_take = training.steps - self.start.step
        schedule_ends = training.warmup_steps + training.peak_steps + training.decay_steps
        rules = [
            (
                search.responses_per_prompt >= training.responses_per_prompt,
                f"search.responses_per_prompt (S) must be >= training.responses_per_prompt (K = "
                f"{training.responses_per_prompt}), got {search.responses_per_prompt}",
            ),
            (
                to_take > 0,
                f"training.steps must be > start.step ({self.start.step}), after which a fork goes on, "
                f"got {training.steps}",
            ),
            (
                sync.every <= to_take,
                f"sync.every must be <= training.steps - start.step ({to_take}), got {sync.every}",
            ),
            (
                sync.lag is None or self.engine.in_flight == "finish",
                f"engine.in_flight must be 'finish' where sync.lag is set ({sync.lag}), which says by which version a "
                f"round is, got {self.engine.in_flight!r}",
            ),
            (
                search.open_rounds == 1 or sync.lag is None,
                f"search.open_rounds must be 1 where sync.lag is set ({sync.lag}), which says by which version a round "
                f"is, got {search.open_rounds}",
            ),
            (
                search.open_rounds == 1 or not search.value_samples,
                f"search.open_rounds must be 1 where search.value_samples is set ({search.value_samples}): a round's "
                f"values are estimated before the next begins, got {search.open_rounds}",
            ),
            (
                search.rounds_per_version is None or sync.lag is None,
                f"search.rounds_per_version does not apply where sync.lag is set ({sync.lag}), which says by which "
                f"version a round is, got {search.rounds_per_version}",
            ),
            (
                search.rounds_per_version is None or self.most_at_first >= search.initial_fill,
                f"search.rounds_per_version x search.searchers x search.prompts_per_round x "
                f"search.responses_per_prompt must be >= search.initial_fill ({search.initial_fill}), or the first "
                f"step never comes, got {self.most_at_first}",
            ),
            (
                (training.groups_per_micro_batch or 1) <= training.prompts_per_step,
                f"training.groups_per_micro_batch must be <= training.prompts_per_step "
                f"({training.prompts_per_step}), got {training.groups_per_micro_batch}",
            ),
            (
                training.ranks <= training.prompts_per_step,
                f"training.ranks must be <= training.prompts_per_step ({training.prompts_per_step}), or some would "
                f"have nothing to learn from, got {training.ranks}",
            ),
            *self._rules_of_ranks(),
            (
                objective.beta_stop <= objective.beta_target,
                f"objective.beta_stop must be <= objective.beta_target ({objective.beta_target}), "
                f"got {objective.beta_stop}",
            ),
            (
                objective.beta_stop > 1 or objective.beta_start == objective.beta_end,
                f"objective.beta_start must be objective.beta_end ({objective.beta_end:g}), which is beta from step "
                "objective.beta_stop (1) on; for a schedule set objective.beta_target and objective.beta_stop too, "
                f"got {objective.beta_start:g}",
            ),
            (
                training.schedule != "warmup-stable-decay" or schedule_ends >= training.steps,
                f"training.schedule: 'warmup-stable-decay' ends at step {schedule_ends} (warmup_steps "
                f"{training.warmup_steps} + stable_steps {training.peak_steps} + decay_steps {training.decay_steps}), "
                f"from where to training.steps, got {training.steps}, the learning rate would be 0; raise "
                "training.stable_steps, or leave it unset: it then takes what the others leave",
            ),
            (
                sync.lag is None or self.prompts_in_step >= training.prompts_per_step * sync.every,
                f"search.searchers x search.prompts_per_round must be >= training.prompts_per_step x sync.every "
                f"({training.prompts_per_step * sync.every}) where sync.lag is set, or steps repeat the prompts of a "
                f"round, got {self.prompts_in_step}",
            ),
            (
                sync.lag is None or sync.keep_versions >= sync.lag + 2,
                f"sync.keep_versions must be >= sync.lag + 2, got {sync.keep_versions} with lag {sync.lag}",
            ),
            (
                not objective.reference_decay or self.model.dtype == "float32",
                f"objective.reference_decay needs model.dtype 'float32', got {self.model.dtype!r}, in which small "
                "moves of the reference round to none",
            ),
            (
                not (self.model.lora_rank and objective.reference_decay),
                f"objective.reference_decay must be 0 where model.lora_rank is set: what adapters add is a product, of "
                f"which no mean of theirs is the mean, got {objective.reference_decay:g}",
            ),
            (
                not self.model.lora_rank or sync.whole_every == 1,
                f"sync.whole_every must be 1 where model.lora_rank is set: adapters are small, and differ in most "
                f"bits, got {sync.whole_every}",
            ),
            (
                self.sampling.capacity >= training.responses_per_prompt,
                f"sampling.capacity must be >= training.responses_per_prompt (K = "
                f"{training.responses_per_prompt}), got {self.sampling.capacity}",
            ),
            (
                self.sampling.max_age is None or self.sampling.max_age >= self.recent_ages[1],
                f"sampling.max_age must be >= {self.recent_ages[1]}, the age that what the newest version generates "
                f"has come to before the next sync (sync.every = {sync.every}"
                f"{'' if sync.lag is None else f', sync.lag = {sync.lag}'}), or steps would have nothing to draw, got "
                f"{self.sampling.max_age}",
            ),
            (
                self.limits.silent_after >= 3 * self.limits.lease_every,
                f"limits.silent_after must be >= 3 x limits.lease_every ({self.limits.lease_every}), "
                f"got {self.limits.silent_after}",
            ),
            (
                self.limits.orphan_after >= 3 * self.limits.lease_every,
                f"limits.orphan_after must be >= 3 x limits.lease_every ({self.limits.lease_every}), or every role "
                f"takes itself for an orphan, got {self.limits.orphan_after}",
            ),
            (
                search.value_samples > 0 or not objective.needs_values,
                f"search.value_samples must be > 0 for objective.name {objective.name!r}, got 0",
            ),
            (
                search.value_samples > 0 or search.value_steps == SearchConfig.value_steps,
                f"search.value_steps does not apply where search.value_samples is 0, got {search.value_steps}",
            ),
            (
                sync.lag is not None or search.initial_fill >= self.batch,
                f"search.initial_fill must be >= training.prompts_per_step x training.responses_per_prompt "
                f"({self.batch}), or the first batch repeats trajectories, got {search.initial_fill}",
            ),
        ]
        for holds, message in rules:
            if not holds:
                raise ValueError(message)
        return self

    def _rules_of_ranks(self) -> list[tuple[bool, str]]:
        """Of what only a trainer that is one process has."""
        objective = self.objective
        alone = {
            "objective.name": (objective.name not in ("ppo", "vine-ppo"), objective.name),
            "objective.log_z": (objective.log_z != "learned", objective.log_z),
            "model.lora_rank": (not self.model.lora_rank, self.model.lora_rank),
        }
        return [
            (
                self.training.ranks == 1 or holds,
                f"training.ranks must be 1 where {name} is {found!r}, got {self.training.ranks}",
            )
            for name, (holds, found) in alone.items()
        ]

    @property
    def batch(self) -> int:
        """Trajectories of one gradient step: B x K."""
        return self.training.prompts_per_step * self.training.responses_per_prompt

    @property
    def responses_per_round(self) -> int:
        return self.search.prompts_per_round * self.search.responses_per_prompt

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its response at most."""
        return self.search.max_prompt_tokens + self.search.max_response_tokens

    @property
    def most_at_first(self) -> int:
        """Trajectories that there can be before the first step, where rounds are bounded."""
        return (self.search.rounds_per_version or 0) * self.search.searchers * self.responses_per_round

    @property
    def prompts_in_step(self) -> int:
        """Of one round of all searchers."""
        return self.search.searchers * self.search.prompts_per_round

    @property
    def evaluation_temperature(self) -> float:
        """Of responses that are sampled to score a version."""
        own = self.evaluation.temperature
        return self.search.temperature if own is None else own

    @property
    def evaluation_top_p(self) -> float:
        own = self.evaluation.top_p
        return self.search.top_p if own is None else own

    @property
    def awaits_searchers(self) -> bool:
        """Whether a sync may wait for what searchers generate with the version before it, which must be there then."""
        return self.sync.lag is not None or self.sampling.max_age is not None

    @property
    def last_sync(self) -> int:
        return self.sync_of_step(self.training.steps)

    def sync_of_step(self, step: int) -> int:
        """The sync that closes a step."""
        return self.start.sync + math.ceil((step - self.start.step) / self.sync.every)

    def sync_before(self, step: int) -> int:
        """The newest sync before a step: its record is the last that the step draws from."""
        return self.start.sync + (step - 1 - self.start.step) // self.sync.every

    def step_of_sync(self, sync: int) -> int:
        """The step that a sync follows, from the start on; the last follows the last step, whatever the period."""
        if sync < self.start.sync:
            raise ValueError(f"sync {sync} lies before the start of this run, sync {self.start.sync}")
        return min(self.start.step + (sync - self.start.sync) * self.sync.every, self.training.steps)

    @property
    def recent_ages(self) -> tuple[int, int, float]:
        """Least, greatest and mean age of recent draws once it has built up: between k and 2k - 1 steps where nobody
        waits, and with a lag that many times k more than 0 to k - 1. Of all draws where the run ends before."""
        k, steps = self.sync.every, self.training.steps - self.start.step
        low = k if self.sync.lag is None else self.sync.lag * k
        low, high = (low, min(low + k, steps) - 1) if steps > low else (0, steps - 1)
        return low, high, (low + high) / 2

    @property
    def bytes_per_trajectory(self) -> int:
        """On disk, measured at about 8 bytes a response token and 3 a prompt token, at full length."""
        return 200 + 3 * self.search.max_prompt_tokens + 8 * self.search.max_response_tokens

    def replace(self, changes: Mapping[str, Any] | None = None, /, **sections: Any) -> "Config":
        """A copy with changes by dotted key, `replace({"training.steps": 10})`; `replace(seed=1)` also works."""
        plain = asdict(self)
        for key, value in {**(changes or {}), **sections}.items():
            *path, leaf = key.split(".")
            place = plain
            for name in path:
                if not isinstance(place.get(name), dict):
                    raise ConfigError(f"unknown setting {key!r}: there is no section {name!r}{_meant(key, plain)}")
                place = place[name]
            if leaf not in place and place is not plain["task"]["options"]:
                known = _meant(key, plain) or _near(key, place) or f"; known here: {', '.join(sorted(place))}"
                raise ConfigError(f"unknown setting {key!r}{known}")
            if isinstance(place.get(leaf), dict):
                if not isinstance(value, Mapping):
                    known = next(iter(place[leaf]), "NAME")
                    raise ConfigError(f"{key}: a section; name a setting in it, such as {key}.{known}")
                value = {**place[leaf], **value}
            place[leaf] = value
        return parse(plain)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _meant(key: str, known: Mapping[str, Any]) -> str:
    """The settings that have the name at the end of a key, in whatever sections."""
    name = key.rpartition(".")[2]
    sections = [it for it, place in known.items() if isinstance(place, dict) and name in place and it != "start"]
    return f"; did you mean {' or '.join(f'{it}.{name}' for it in sections)}?" if sections else ""


def _near(key: str, place: Mapping[str, Any]) -> str:
    """The names of a section that are written much like the one at the end of a key."""
    section, dot, name = key.rpartition(".")
    found = get_close_matches(name, place, cutoff=0.8)
    return f"; did you mean {' or '.join(f'{section}{dot}{it}' for it in found)}?" if found else ""


_adapter = TypeAdapter(Config)


def parse(plain: Mapping[str, Any] | str) -> Config:
    """A config from nested dicts or JSON; one clear line for every field at fault."""
    try:
        if isinstance(plain, str):
            return _adapter.validate_json(plain)
        return _adapter.validate_python(dict(plain) if isinstance(plain, Mapping) else plain)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def parse_options(kind: type[T], task: TaskConfig) -> T:
    """`task.options` as a task's own class of settings."""
    if getattr(kind, "__pydantic_config__", {}).get("extra") != "forbid":
        raise TypeError(f"class {kind.__qualname__} is not made with @tba.config.settings: it may take any name")
    try:
        return TypeAdapter(kind).validate_python(task.options)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, "task", "options") for e in error.errors())) from None


def parse_known(plain: Mapping[str, Any]) -> Config:
    """For whoever only looks at a run: settings of a later version, which this one does not know, are left out. To go
    on with such a run would be another experiment, which `parse` refuses."""
    return parse(_known(plain, Config().to_dict()))


def _known(plain: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _known(value, known[name]) if known[name] and isinstance(value, Mapping) else value
        for name, value in plain.items()
        if name in known
    }


def _explain(error: Any, *section: str) -> str:
    field = ".".join(map(str, (*section, *error["loc"]))) or "the settings"
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"unknown setting {field!r}"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    is_list = error["type"] in ("tuple_type", "list_type")
    wanted = "must be a list, such as [1,4]" if is_list else f"{error['msg'][0].lower()}{error['msg'][1:]}"
    return f"{field}: {wanted}, got {error['input']!r}"
