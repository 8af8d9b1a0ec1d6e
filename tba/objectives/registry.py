"""The registry of objectives: builds an objective from its name and settings."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from tba.config import ObjectiveConfig
from tba.objectives.corrections import Correction
from tba.objectives.groups import Anchor, Estimates, Groups, Loss
from tba.objectives.grpo import OWN as GRPO
from tba.objectives.grpo import OWN_DR as DR_GRPO
from tba.objectives.grpo import dr_grpo, grpo
from tba.objectives.online_dpo import online_dpo
from tba.objectives.policy_gradient import Surrogate
from tba.objectives.ppo import OWN as PPO
from tba.objectives.ppo import estimates, ppo
from tba.objectives.regressions import kimi, oapl
from tba.objectives.reinforce import OWN as REINFORCE
from tba.objectives.reinforce import reinforce
from tba.objectives.rloo import OWN as RLOO
from tba.objectives.rloo import PROXIMAL, rloo
from tba.objectives.tba_prime import OWN as TBA_PRIME
from tba.objectives.tba_prime import tba_prime
from tba.objectives.trajectory_balance import LogZ, trajectory_balance
from tba.objectives.vine_ppo import OWN as VINE_PPO
from tba.objectives.vine_ppo import estimates as vine_estimates
from tba.objectives.vine_ppo import vine_ppo


class Objective(Protocol):
    def __call__(self, groups: Groups, *, beta: float) -> Loss: ...


class Estimator(Protocol):
    """Estimates what an objective needs from the whole batch, before the gradients of its parts are taken."""

    def __call__(self, groups: Groups, *, beta: float) -> Estimates: ...


_GRADIENTS: dict[str, tuple[Callable[..., Loss], Surrogate]] = {
    "tba-prime": (tba_prime, TBA_PRIME),
    "reinforce": (reinforce, REINFORCE),
    "rloo": (rloo, RLOO),
    "proximal-rloo": (rloo, PROXIMAL),
    "grpo": (grpo, GRPO),
    "dr-grpo": (dr_grpo, DR_GRPO),
    "vine-ppo": (vine_ppo, VINE_PPO),
}


def make_objective(config: ObjectiveConfig, *, max_tokens: int) -> Objective:
    """Build the objective. `max_tokens` is the maximum length of a response in tokens."""
    match config.name:
        case "trajectory-balance":
            return partial(
                _of_groups, log_z=config.log_z, anchor="reference" if config.anchor == "own" else config.anchor
            )
        case "online-dpo":
            return online_dpo
        case "kimi":
            return partial(kimi, anchor="reference" if config.anchor == "own" else config.anchor)
        case "oapl":
            anchor = "behaviour" if config.anchor == "own" else config.anchor
            return partial(oapl, value_beta=config.value_beta, anchor=anchor)
        case "ppo":
            return partial(ppo, surrogate=_chosen(config, PPO, max_tokens), value_share=config.value_share)
        case name:
            loss, own = _GRADIENTS[name]
            options = {"centre": config.centre} if name == "tba-prime" else {}
            return partial(loss, surrogate=_chosen(config, own, max_tokens), **options)


def make_estimator(config: ObjectiveConfig) -> Estimator | None:
    """Build the estimator of an objective. Return None if the objective needs nothing from the whole batch."""
    match config.name:
        case "ppo":
            surrogate = _chosen(config, PPO, max_tokens=0)
            return partial(estimates, surrogate=surrogate, discount=config.discount, decay=config.gae_decay)
        case "vine-ppo":
            return vine_estimates
        case _:
            return None


def _chosen(config: ObjectiveConfig, own: Surrogate, max_tokens: int) -> Surrogate:
    """Return the objective's own surrogate, with the parts replaced that the settings choose."""
    correction = Correction(
        kind=config.correction_kind,
        level=own.correction.level if config.correction_level == "own" else config.correction_level,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        cap=config.ratio_cap,
        prox_share=config.prox_share,
    )
    return replace(
        own,
        correction=correction,
        normaliser=own.normaliser if config.normaliser == "own" else config.normaliser,
        penalty=own.penalty if config.penalty == "own" else config.penalty,
        max_tokens=max_tokens,
    )


def _of_groups(groups: Groups, *, beta: float, log_z: LogZ | Literal["learned"], anchor: Anchor) -> Loss:
    loss = trajectory_balance(
        groups.logp_PK,
        groups.anchor_logp_PK(anchor),
        groups.reward_PK,
        beta=beta,
        log_z=groups.needed("log_z_P") if log_z == "learned" else log_z,
        reference_power=groups.reference_power,
    )
    log_ratio = (groups.logp_PK - groups.ref_logp_PK).detach().mean()  # to the reference, whatever the anchor is
    return loss._replace(metrics={**loss.metrics, "log_ratio_mean": log_ratio})
