"""Corrections for data that another policy sampled: what is maximised for a token, or a response, of an advantage A.

With the ratio rho = pi / mu of the policy to what sampled it:

    none        A log pi                                         no correction
    clip        min(rho A, clip(rho, 1 - low, 1 + high) A)       PPO; RLOO for whole responses, GSPO for their means
    cap         min(rho, cap) A                                  AIPO, TBA': no gradient beyond the cap
    truncate    SG[min(rho, cap)] A log pi                       TIS: a gradient of bounded weight everywhere
    cispo       SG[clip(rho, 1 - low, 1 + high)] A log pi        CISPO
    mask        rho A where 1 / cap <= rho <= cap, else 0        IcePop
    decoupled   SG[prox / mu] min(r A, clip(r) A)                AReaL, with r = pi / prox

At pi = mu the gradient of each is A grad log pi. A step is one update on its batch, so the policy at the start of the
update, to which others take the ratio in PPO and TIS, is the policy itself: there that ratio is 1. For `decoupled`,
log prox lies `prox_share` of the way from log mu to log pi: 0 gives `clip`; at 1 nothing is clipped, and the weight
pi / mu has no bound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tba.objectives.groups import LARGEST
from tba.types import CorrectionKind, Level


@dataclass(frozen=True, kw_only=True)
class Correction:
    kind: CorrectionKind = "none"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 8.0
    prox_share: float = 0.5

    def maximised(self, logp: Tensor, behaviour_logp: Tensor | None, advantage: Tensor) -> Tensor:
        """In the shape of `logp`; only without a correction `behaviour_logp` can be missing."""
        if self.kind == "none":
            return advantage * logp
        if behaviour_logp is None:
            raise ValueError(f"the correction {self.kind!r} needs log-probabilities under what sampled, got None")
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
        """What is cut off: pi / mu, or pi / prox."""
        other_logp = self._prox_logp(logp, behaviour_logp) if self.kind == "decoupled" else behaviour_logp
        return _ratio(logp, other_logp)

    def cut(self, ratio: Tensor) -> Tensor:
        """Where it is beyond its bounds."""
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
    """Finite however far apart the two are."""
    return torch.exp((logp - other_logp).clamp(-LARGEST, LARGEST))
