"""Settings of the trainer, of syncs and of evaluation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.config.fields import Count as Count
from tba.config.fields import Positive as Positive
from tba.config.fields import Share as Share
from tba.config.fields import Temperature as Temperature
from tba.config.fields import TopP as TopP
from tba.config.fields import settings as settings

OptimizerName = Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-on-host"]


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
