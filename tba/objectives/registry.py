# ruff: noqa: F401  # an import registers
"""The objectives that `objective.name` can choose: every class that is imported here."""

import inspect
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tba.objectives.objective import Objective
from tba.objectives.online_dpo import OnlineDPO
from tba.objectives.policy_gradients.bapo import BAPO
from tba.objectives.policy_gradients.grpo import GRPO, DrGRPO
from tba.objectives.policy_gradients.m2po import M2PO
from tba.objectives.policy_gradients.ppo import PPO
from tba.objectives.policy_gradients.reinforce import Reinforce
from tba.objectives.policy_gradients.rloo import RLOO, ProximalRLOO
from tba.objectives.policy_gradients.tba_prime import TBAPrime
from tba.objectives.policy_gradients.vine_ppo import VinePPO
from tba.objectives.regressions import OAPL, Kimi
from tba.objectives.subtrajectory_balance import SubTrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance


def _concrete(kind: type[Objective]) -> Iterator[type[Objective]]:
    for subclass in kind.__subclasses__():
        if not inspect.isabstract(subclass):
            yield subclass
        yield from _concrete(subclass)


OBJECTIVES = {kind.name: kind for kind in sorted(_concrete(Objective), key=lambda kind: kind.name)}

if TYPE_CHECKING:
    AnyObjective = Objective
else:
    AnyObjective = Annotated[reduce(or_, OBJECTIVES.values()), Field(discriminator="name")]
    """The settings of any objective. `name` selects the class."""
