"""The training objectives: the losses that a gradient step minimises. Each has a file of its own, and all are pure
functions of tensors."""

from tba.objectives.groups import Estimates, Groups, Loss, joined
from tba.objectives.registry import Estimator, Objective, make_estimator, make_objective
from tba.objectives.trajectory_balance import trajectory_balance

__all__ = [
    "Estimates",
    "Estimator",
    "Groups",
    "Loss",
    "Objective",
    "joined",
    "make_estimator",
    "make_objective",
    "trajectory_balance",
]
