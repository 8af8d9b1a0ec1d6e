"""Settings of the trainer, of syncs and of evaluation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.settings import Count, Positive, Temperature, TopP, settings

OptimizerName = Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-on-host"]


@settings
class TrainingConfig:
    """How the trainer takes gradient steps."""

    steps: Positive = 100
    """Number of gradient steps of the run. In a fork, the steps before its start count too."""
    prompts_per_step: Positive = 8
    """B: number of prompts in a batch. Each gradient step learns from B x K responses, where K is
    `training.responses_per_prompt`. Higher values give less noisy gradients and slower steps."""
    responses_per_prompt: Annotated[int, Field(ge=2)] = 8
    """K: number of responses to each prompt in a batch. The loss compares the responses to a prompt with each other, so
    K is at least 2. Higher values give less noisy gradients and slower steps."""
    groups_per_micro_batch: Positive | None = None
    """Number of prompts whose gradients are computed at once, each with all its responses. More is faster and takes
    more memory. Unset, it is 8, or `prompts_per_step` if that is fewer. Set it or `tokens_per_micro_batch`, which
    measures micro-batches in tokens instead, but not both."""
    tokens_per_micro_batch: Positive | None = None
    """Maximum number of tokens in a micro-batch, which then has as many whole prompts with their responses as fit. More
    is faster and takes more memory. A prompt whose responses do not fit is computed in several passes, with the same
    gradients; a single response that does not fit is computed in one pass. Unset, micro-batches are measured in prompts
    (`groups_per_micro_batch`)."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of processes that the trainer is spread over, each with its own GPU if there are any. Each process holds a
    part of the weights, gradients and optimizer state, and computes a part of the batch. The trainer starts them on its
    own machine. If something else starts them, such as torchrun, its `WORLD_SIZE` counts instead."""
    copy_per: Literal["trainer", "node"] = "trainer"
    """Which ranks share one copy of the weights, gradients and optimizer state. `trainer`: all ranks. `node`: the ranks
    of each machine, so that machines send each other only gradients, and each GPU needs more memory. On a single
    machine both are the same."""
    compute_dtype: Literal["auto", "bfloat16-on-gpu", "float32", "bfloat16"] = "float32"
    """Number format of matrix products in the trainer when `model.dtype` is float32. With bfloat16, the weights,
    gradients, optimizer state, log-softmax and sums stay in float32. `auto`, which all presets use, means bfloat16 on a
    GPU, and on a CPU that multiplies bfloat16 (AVX512_BF16, AMX) for models of at least 2 million parameters; otherwise
    float32. So steps can be repeated exactly only on CPUs for which the choice is the same. `bfloat16-on-gpu` means
    float32 on every CPU: it is what `auto` meant in older runs. A run that was stored
    without this setting uses float32. With a `model.dtype` of bfloat16 this setting has no effect."""
    computed_rows: Literal["all", "needed"] = "all"
    """Rows of a batch that the trainer computes. `all`: each row. `needed`, which all presets use: equal rows of a
    micro-batch are computed once, and groups whose gradient is 0 up to rounding are not computed, such as groups with
    equal rewards under an objective without a KL penalty. The gradients are the same up to rounding. The ledger has no
    `logp` for rows that were not computed, and means such as `log_ratio_mean` leave them out. A run that was stored
    without this setting computes all rows."""
    checkpoint_activations: bool = False
    """Whether layers keep only their inputs and compute the rest again in the backward pass. This saves memory and
    takes about a third more time, with the same gradients."""
    optimizer: OptimizerName = "adamw"
    """The form of AdamW. `adamw`: AdamW of torch, fused on a GPU. `adamw-fused`: AdamW of torch, fused on a CPU too,
    where results differ by rounding. `adamw-8bit`: the moments take 8 bits per number, which saves memory.
    `adamw-on-host`: the moments are kept and the update is computed in main memory, which saves GPU memory and is
    slower."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Peak learning rate. Higher values learn faster until training becomes unstable."""
    schedule: Literal["constant", "linear", "warmup-stable-decay"] = "constant"
    """Learning rate schedule. `constant`: the peak until the end. `linear`: from the peak to 0 in a straight line,
    which ends at the last step. `warmup-stable-decay`: `stable_steps` at the peak, then to 0 along a cosine in
    `decay_steps`. Every schedule begins with a warmup of `warmup_steps`."""
    warmup_steps: Count = 0
    """Number of steps in which the learning rate rises from 0 to its peak in a straight line, with any schedule."""
    stable_steps: Count | None = None
    """Number of steps at the peak of the schedule `warmup-stable-decay`. Unset, all steps that `warmup_steps` and
    `decay_steps` leave."""
    decay_steps: Count = 0
    """Number of steps from the peak to 0 in the schedule `warmup-stable-decay`. With 0 the rate stays at the peak,
    except that a last step at the very end of the schedule has the rate 0. If `training.steps` ends the run earlier,
    the learning rate does not reach 0."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment of AdamW, the moving average of gradients. Higher values average over more steps.
    0 keeps no first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate of the second moment of AdamW, the moving average of squared gradients. Higher values average over
    more steps."""
    adam_eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Number that AdamW adds to the root of the second moment, against division by zero."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Weight decay of AdamW: each step shrinks the weights by this number times the learning rate."""
    clip_norm: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Maximum norm of the gradient. A larger gradient is scaled down to this norm. 0 does not clip, as in the paper."""
    rate_by_effective_share: bool = False
    """Whether the learning rate of a step is multiplied by the root of the batch's effective share: the effective
    number of its responses, by their importance ratios, divided by their number. Steps from data that the policy has
    moved away from are then shorter, as in VCPO (arXiv:2602.17616)."""

    @model_validator(mode="after")
    def _micro_batches_are_of_groups_or_of_tokens(self) -> Self:
        if self.tokens_per_micro_batch is not None and self.groups_per_micro_batch is not None:
            raise ValueError(
                f"training.groups_per_micro_batch must be null where training.tokens_per_micro_batch is set "
                f"({self.tokens_per_micro_batch}), got {self.groups_per_micro_batch}: only one of them can say how "
                "large a micro-batch is"
            )
        return self

    @property
    def most_groups(self) -> int | None:
        """Maximum number of groups in a micro-batch; None if `tokens_per_micro_batch` limits it instead."""
        if self.tokens_per_micro_batch is not None:
            return None
        return self.groups_per_micro_batch or min(8, self.prompts_per_step)

    @property
    def peak_steps(self) -> int:
        """`stable_steps`, or if that is unset the steps that `warmup_steps` and `decay_steps` leave, at least 0."""
        if self.stable_steps is not None:
            return self.stable_steps
        return max(0, self.steps - self.warmup_steps - self.decay_steps)


def same_moments(one: OptimizerName, other: OptimizerName) -> bool:
    """True if one optimizer can continue with the moments that the other has stored."""
    return (one == "adamw-8bit") == (other == "adamw-8bit")


@settings
class SyncConfig:
    """How often trainer and searchers exchange data, and which versions and checkpoints are kept."""

    every: Positive = 2
    """k: gradient steps between syncs. At a sync the trainer publishes its weights and admits the trajectories that
    have arrived. It publishes none while the store still receives an earlier version, unless the sync writes a
    checkpoint or `sync.lag` or `sampling.max_age` is set. Higher values mean older data."""
    lag: Annotated[int, Field(ge=0, le=10**6)] | None = None
    """Unset, searchers generate with the newest version, and each sync admits what has arrived. A number makes
    searchers and trainer wait for each other: each sync admits one round of every searcher, generated by the version
    that is this many syncs old. 0 trains synchronously; higher values let generation and training overlap, and train on
    older data."""
    checkpoint_every: Positive = 5
    """Number of syncs between two checkpoints. With higher values less is written, and more steps are repeated after a
    crash."""
    keep_versions: Annotated[int, Field(ge=2)] = 4
    """Number of newest versions that are kept; with `sync.lag`, at least 2 more than the lag. The first version, and
    versions that are to be evaluated, are kept as well."""
    whole_every: Positive = 1
    """Number of consecutive versions that form a group. The first version of each group is stored whole; 1 stores all
    versions whole. Each other version is stored as its difference from the last whole version, or whole if the
    difference takes half the space or more. Higher values pay off when searchers fetch bfloat16 versions over a network
    and the learning rate is small."""
    transport: Literal["storage", "shared-memory"] = "storage"
    """How versions reach searchers on the trainer's machine. `storage`: searchers load what is stored.
    `shared-memory`: they load the files from main memory, in /dev/shm, before these are stored, and store trajectories
    only after the versions that generated them. /dev/shm needs room for four versions, or five with
    `sync.whole_every`."""
    keep_checkpoints: Annotated[int, Field(ge=2, le=10**9)] = 2
    """Number of newest checkpoints that are kept. Older checkpoints are removed."""
    weights_digest: Literal["pieces", "whole"] = "pieces"
    """How the weights after each sync are hashed for the ledger. `pieces`: threads hash pieces of the weights side by
    side. `whole`: one thread hashes all weights, as runs did before this setting existed."""


@settings
class EvaluationConfig:
    """Which versions are evaluated, and how. The formulas are in docs/evaluation.md."""

    every: Positive = 10
    """Number of syncs between two evaluated versions. If an evaluation takes longer than this, the evaluator skips to
    newer versions. The first and the last version are always evaluated."""
    prompts: Positive = 1319
    """Maximum number of held-out prompts in an evaluation. More prompts give less noisy scores and take longer."""
    examples: Annotated[int, Field(ge=0, le=1000)] = 10
    """Number of prompts whose greedy responses are stored with the scores: the first prompts of the evaluation. The
    view `examples` and the report show them. 0 stores none; higher values make the records larger."""
    samples: Count = 0
    """Number of responses sampled per prompt, in addition to the greedy response. 0 samples none."""
    temperature: Temperature | None = None
    """Temperature of the sampled responses in evaluations. Unset, it is `search.temperature`."""
    top_p: TopP | None = None
    """`top_p` of the sampled responses in evaluations. Unset, it is `search.top_p`."""
    pass_at: tuple[Positive, ...] = ()
    """The values of k for which pass@k is computed from the sampled responses. Each k is at most
    `evaluation.samples`."""
    solved_at: float = 1.0
    """Lowest reward with which a response counts as correct in pass@k."""

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"evaluation.pass_at must not repeat a number, got {list(self.pass_at)}")
        if max(self.pass_at, default=0) > self.samples:
            raise ValueError(
                f"evaluation.pass_at must be at most evaluation.samples ({self.samples}), got {list(self.pass_at)}"
            )
        for name in ("temperature", "top_p"):
            if not self.samples and (value := getattr(self, name)) is not None:
                raise ValueError(f"evaluation.{name} does not apply where evaluation.samples is 0, got {value}")
        if not self.pass_at and self.solved_at != type(self).solved_at:
            raise ValueError(
                f"evaluation.solved_at does not apply where evaluation.pass_at is empty, got {self.solved_at}"
            )
        return self
