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
