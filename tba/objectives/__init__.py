"""Objectives: pure functions from tensors to a loss."""

from tba.objectives.trajectory_balance import Loss, trajectory_balance

__all__ = ["Loss", "trajectory_balance"]
