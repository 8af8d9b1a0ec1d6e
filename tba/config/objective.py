"""Settings of the objective."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.config.fields import Beta as Beta
from tba.config.fields import Count as Count
from tba.config.fields import Positive as Positive
from tba.config.fields import Share as Share
from tba.config.fields import T as T
from tba.config.fields import Tempering as Tempering
from tba.config.fields import settings as settings
from tba.types import CorrectionKind, Level, Normaliser, Penalty

ObjectiveName = Literal[
    "trajectory-balance", "tba-prime", "reinforce", "rloo", "proximal-rloo", "grpo", "dr-grpo", "online-dpo", "kimi",
    "oapl", "ppo", "vine-ppo",
]  # fmt: skip
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
    """The training objective: the loss, the temperature beta of its target, and the reference. The value `own` leaves a
    choice to the objective. The formulas are in docs/objectives.md."""

    name: ObjectiveName = "trajectory-balance"
    """The training objective."""
    beta_start: Beta = 0.05
    """Beta at step 1: the weight of staying close to the reference. A lower beta follows the reward more strongly."""
    beta_end: Beta = 0.05
    """Beta from step `beta_stop` on. For a constant beta, set `beta_start` and `beta_end` to the same value."""
    beta_target: Positive = 1
    """Step at which the straight line from `beta_start` would reach `beta_end`."""
    beta_stop: Positive = 1
    """Step from which beta is `beta_end`. If it comes before `beta_target`, beta jumps there."""
    target_temperature_start: Tempering = 1.0
    """T at step 1: log pi_ref and reward / beta are both divided by T. A higher T flattens the target distribution."""
    target_temperature_steps: Positive = 1
    """Number of steps over which T moves to 1 in a straight line."""
    reference_temperature_end: Tempering = 1.0
    """Gamma at the end of its schedule: log pi_ref alone is divided by gamma, on top of T. A higher gamma weakens the
    pull of the reference."""
    reference_temperature_steps: Positive = 1
    """Number of steps over which gamma moves from 1 to its final value in a straight line."""
    include_eos: bool = True
    """Whether a generated end token counts as part of the response. The GSM8K runs of the paper leave it out."""
    reference_reset: Count = 0
    """Number of steps between resets of the reference to the current policy. 0 never resets it."""
    reset_optimizer: bool = False
    """Whether the optimizer state is cleared when the reference is reset."""
    reference_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of itself that the reference keeps at each step; the rest is taken from the policy (an exponential moving
    average). Higher values move the reference more slowly. 0 keeps the reference fixed."""
    log_z: Literal["group", "leave-one-out", "learned"] = "group"
    """How log Z is estimated: as the mean over the whole group, as the mean over the other responses of the group, or
    learned by a model beside the policy."""
    log_z_learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """Peak learning rate of the model that learns log Z. The schedule is the one of the policy."""
    correction: Literal["own"] | CorrectionKind = "own"
    """Off-policy correction: how the loss accounts for responses that another policy sampled."""
    correction_level: Literal["own"] | Level = "own"
    """Level at which importance ratios are taken: per token, per response, or the mean over a response."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Importance ratios are clipped below 1 minus this value. Higher values allow larger updates."""
    clip_high: Annotated[float, Field(ge=0, le=1e9)] = 0.2
    """Importance ratios are clipped above 1 plus this value. Higher values allow larger updates."""
    ratio_cap: Annotated[float, Field(ge=1, le=1e9)] = 8.0
    """Limit of the importance ratio for corrections that cap, truncate or mask. Higher values cut fewer ratios and let
    single responses weigh more."""
    prox_share: Share = 0.5
    """For the decoupled correction: position of the proximal policy between the behaviour policy (0) and the current
    policy (1)."""
    normaliser: Literal["own"] | Normaliser = "own"
    """Number by which the sum over the tokens of a response is divided."""
    penalty: Literal["own"] | Penalty = "own"
    """Where the KL penalty against the reference is applied: in the reward, in the loss, or nowhere."""
    centre: Literal["policy", "behaviour"] = "policy"
    """Policy under which `tba-prime` takes the mean log-ratio of a group: the current policy, or the behaviour policy
    that sampled the responses. The runs of the paper use the behaviour policy."""
    anchor: Literal["own", "reference", "behaviour"] = "own"
    """Policy that the log-ratio of trajectory balance, or of a regression, is taken against: the reference, or the
    behaviour policy that sampled each response."""
    value_beta: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Temperature with which `oapl` averages the rewards of a group. 0 uses beta."""
    discount: Share = 1.0
    """Discount factor of `ppo` per token. 1 counts a later reward in full."""
    gae_decay: Share = 0.95
    """Lambda of generalised advantage estimation in `ppo`. 1 uses the whole rest of the response; lower values rely
    more on the value model."""
    value_share: Annotated[float, Field(gt=0, le=1e3)] = 0.1
    """Weight of the value loss relative to the policy loss."""
    value_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Peak learning rate of the value model, on the schedule of the policy. 0 uses `training.learning_rate`."""

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
