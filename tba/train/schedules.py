"""What changes from step to step: the target of trajectory balance, pi_ref^power exp(r / beta), and the learning rate.
Pure functions; steps count from 1."""

import math

from tba.config import ObjectiveConfig, TrainingConfig


def beta_at(step: int, objective: ObjectiveConfig) -> float:
    """A line from `beta_start` at step 1 towards `beta_end` at step `beta_target` + 1, cut short at `beta_stop`.

    From step `beta_stop` on it is `beta_end`: a jump where that comes before the line has arrived. Where the whole
    target has a temperature, it is that many times as large.
    """
    _check(step)
    if step >= objective.beta_stop:
        beta = objective.beta_end
    else:
        beta = _line(objective.beta_start, objective.beta_end, (step - 1) / objective.beta_target)
    return beta * target_temperature_at(step, objective)


def reference_power_at(step: int, objective: ObjectiveConfig) -> float:
    """How much log pi_ref counts in the target: 1 / (gamma T)."""
    _check(step)
    done = min(1.0, (step - 1) / objective.reference_temperature_steps)
    gamma = _line(1.0, objective.reference_temperature_end, done)
    return 1 / (gamma * target_temperature_at(step, objective))


def target_temperature_at(step: int, objective: ObjectiveConfig) -> float:
    """A line from `target_temperature_start` at step 1 to 1 at step `target_temperature_steps` + 1."""
    _check(step)
    return _line(objective.target_temperature_start, 1.0, min(1.0, (step - 1) / objective.target_temperature_steps))


def learning_rate_at(step: int, training: TrainingConfig) -> float:
    """The peak rate times the schedule's factor. The first update already has the factor of step 1, not of step 0,
    and a linear schedule reaches zero at the last one."""
    return training.learning_rate * learning_rate_factor(step, training)


def learning_rate_factor(step: int, training: TrainingConfig) -> float:
    """What the schedule makes of a peak rate."""
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


def _line(start: float, end: float, done: float) -> float:
    return start * (1 - done) + end * done


def _check(step: int) -> None:
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
