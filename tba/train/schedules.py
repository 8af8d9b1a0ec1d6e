"""Schedules: beta and the power in the target of trajectory balance, pi_ref^power exp(r / beta), and the learning rate.
All functions are pure. Steps count from 1."""

import math

from tba.config import TrainingConfig
from tba.objectives.objective import Objective, line


def beta_at(step: int, objective: Objective) -> float:
    """Return the beta to use at a step: the scheduled beta times the temperature of the target distribution.

    Before step `beta_stop`, the scheduled beta lies on the straight line from `beta_start` at step 1 to `beta_end` at
    step `beta_target` + 1. From step `beta_stop` on, it is `beta_end`.
    """
    _check(step)
    if step >= objective.beta_stop:
        beta = objective.beta_end
    else:
        beta = line(objective.beta_start, objective.beta_end, (step - 1) / objective.beta_target)
    return beta * objective.target_temperature_at(step)


def reference_power_at(step: int, objective: Objective) -> float:
    """Return the power of pi_ref in the target: 1 / (gamma T)."""
    _check(step)
    return 1 / (objective.reference_temperature_at(step) * objective.target_temperature_at(step))


def learning_rate_at(step: int, training: TrainingConfig) -> float:
    """Return the learning rate of a step: the peak rate times the factor of the schedule. The first update uses the
    factor of step 1, not of step 0, and a linear schedule reaches 0 at the last update."""
    return training.learning_rate * learning_rate_factor(step, training)


def learning_rate_factor(step: int, training: TrainingConfig) -> float:
    """Return the factor by which the schedule multiplies a peak rate."""
    _check(step)
    warmup, stable, decay = training.warmup_steps, training.peak_steps, training.decay_steps
    if step < warmup:
        return step / warmup
    if training.schedule == "constant":
        return 1.0
    if training.schedule == "linear":
        return max(0, training.steps - step) / max(1, training.steps - warmup)
    if step < warmup + stable:
        return 1.0
    if step < warmup + stable + decay:
        return 0.5 * (1 + math.cos(math.pi * (step - warmup - stable) / decay))
    return 0.0


def _check(step: int) -> None:
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
