"""The weights that `objective.weights` can choose, for residuals of trajectory balance. Each is a function with a file
of its own."""
# Shapes: P prompts in the batch, K responses per prompt.

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tba.objectives.weights.mean_ratio import mean_ratio
from tba.objectives.weights.ratio import ratio
from tba.objectives.weights.second_moment import second_moment

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WEIGHTS", "Weigh", "ratio"]

Weigh = Callable[["Tensor", "Tensor", float], "Tensor"]
"""Takes log pi - log mu of whole responses, [P, K], without gradient, their numbers of tokens, [P, K], and
`objective.weight_cap`. Returns weights that are not negative, [P, K]. At least one weight of each group is positive."""

WEIGHTS: Mapping[str, Weigh] = {"ratio": ratio, "mean-ratio": mean_ratio, "second-moment": second_moment}
