"""The training objectives: the losses that a gradient step minimises. Each loss is a pure function of tensors, in the
same file as its settings."""

from tba.objectives.groups import Estimates, Groups, Loss
from tba.objectives.objective import Objective
from tba.objectives.registry import OBJECTIVES, AnyObjective
from tba.objectives.trajectory_balance import TrajectoryBalance, trajectory_balance

__all__ = [
    "OBJECTIVES",
    "AnyObjective",
    "Estimates",
    "Groups",
    "Loss",
    "Objective",
    "TrajectoryBalance",
    "trajectory_balance",
]
