"""Corrections for data that another policy sampled. Each is a term that is maximised for a token or a response with
advantage A.

pi is the policy, mu the policy that sampled, and rho = pi / mu the importance ratio:

    none        A log pi                                         no correction
    clip        min(rho A, clip(rho, 1 - low, 1 + high) A)       PPO; RLOO for whole responses, GSPO for their means
    cap         min(rho, cap) A                                  AIPO, TBA': no gradient beyond the cap
    truncate    SG[min(rho, cap)] A log pi                       TIS: a gradient of bounded weight everywhere
    cispo       SG[clip(rho, 1 - low, 1 + high)] A log pi        CISPO
    mask        rho A where 1 / cap <= rho <= cap, else 0        IcePop
    decoupled   SG[prox / mu] min(r A, clip(r) A)                AReaL, with r = pi / prox

At pi = mu the gradient of each term is A grad log pi. A gradient step is one update on its batch. Other implementations
of PPO and TIS take the ratio to the policy at the start of the update; here that policy is pi itself, and the ratio
would be 1. For `decoupled`, log prox lies `prox_share` of the way from log mu to log pi. With `prox_share` 0 the term
is that of `clip`; with 1 nothing is clipped, and the weight pi / mu has no bound. SG stops the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba.objectives.groups import LARGEST
from tba.runtime.lazy_torch import torch
from tba.types import CorrectionKind, Level

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Correction:
    kind: CorrectionKind = "none"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 8.0
    prox_share: float = 0.5

    def maximised(self, logp: Tensor, behaviour_logp: Tensor | None, advantage: Tensor) -> Tensor:
        """Return the term to maximise, in the shape of `logp`. `behaviour_logp` may be None if `kind` is `none`."""
        if self.kind == "none":
            return advantage * logp
        if behaviour_logp is None:
            raise ValueError(f"the correction {self.kind!r} needs log-probabilities of the sampling policy, got None")
        ratio = self.ratio(logp, behaviour_logp)
        match self.kind:
            case "clip":
                return self._clipped_gain(ratio, advantage)
            case "cap":
                return ratio.clamp(max=self.cap) * advantage
            case "truncate":
                return ratio.detach().clamp(max=self.cap) * advantage * logp
            case "cispo":
                return self._clip(ratio.detach()) * advantage * logp
            case "mask":
                return torch.where(self.cut(ratio), 0, ratio) * advantage
            case "decoupled":
                weight = _ratio(self._prox_logp(logp, behaviour_logp), behaviour_logp)
                return weight * self._clipped_gain(ratio, advantage)

    def ratio(self, logp: Tensor, behaviour_logp: Tensor) -> Tensor:
        """Return the importance ratio that the correction bounds: pi / mu, or pi / prox for `decoupled`."""
        other_logp = self._prox_logp(logp, behaviour_logp) if self.kind == "decoupled" else behaviour_logp
        return _ratio(logp, other_logp)

    def cut(self, ratio: Tensor) -> Tensor:
        """Return a boolean tensor that is true where the ratio is outside its bounds."""
        match self.kind:
            case "cap" | "truncate":
                return ratio > self.cap
            case "mask":
                return (ratio > self.cap) | (ratio < 1 / self.cap)
            case _:
                return (ratio > 1 + self.clip_high) | (ratio < 1 - self.clip_low)

    def _prox_logp(self, logp: Tensor, behaviour_logp: Tensor) -> Tensor:
        return behaviour_logp + self.prox_share * (logp.detach() - behaviour_logp)

    def _clipped_gain(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        return torch.minimum(ratio * advantage, self._clip(ratio) * advantage)

    def _clip(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.clip_low, 1 + self.clip_high)


def _ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """Return the ratio of two probabilities. The log-ratio is clamped, so the result is always finite."""
    return torch.exp((logp - other_logp).clamp(-LARGEST, LARGEST))
