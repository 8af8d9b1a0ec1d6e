"""What a step minimises: one file per objective, pure functions of tensors."""

from tba.objectives.groups import Groups, Loss
from tba.objectives.named import Objective, make_objective
from tba.objectives.trajectory_balance import trajectory_balance

__all__ = ["Groups", "Loss", "Objective", "make_objective", "trajectory_balance"]
