"""Drawn trajectories column by column: what storage hands over and a batch is made of, without an object per row or
number. NumPy only."""
# Shapes: B rows, N elements in all.

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np


class Lists(NamedTuple):
    """A list of numbers per row, one after the other."""

    elements_N: np.ndarray
    lengths_B: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], dtype: type[np.number]) -> "Lists":
        lengths_B = np.fromiter(map(len, rows), np.int64, count=len(rows))
        return cls(np.fromiter(chain.from_iterable(rows), dtype, count=lengths_B.sum()), lengths_B)

    def first(self, counted_B: np.ndarray) -> "Lists":
        """Of each list the first so many elements."""
        ends_B = np.cumsum(self.lengths_B)
        left_N = np.repeat(ends_B - self.lengths_B + counted_B, self.lengths_B)
        return Lists(self.elements_N[np.arange(len(self.elements_N)) < left_N], counted_B)

    def where(self, mask: "Lists | None") -> "Lists":
        """0 where a mask of the same lengths is false."""
        return self if mask is None else Lists(np.where(mask.elements_N, self.elements_N, 0), self.lengths_B)

    def sums(self) -> np.ndarray:
        """Of each list, in double precision."""
        row_N = np.repeat(np.arange(len(self.lengths_B)), self.lengths_B)
        return np.bincount(row_N, weights=self.elements_N, minlength=len(self.lengths_B))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Each field has one entry per row, in the order of the draws."""

    trajectory_ids: Sequence[str]
    prompt_ids: Sequence[str]
    prompt_tokens: Lists  # integers
    response_tokens: Lists  # integers, EOS last where finished
    ref_logps: Lists  # one per token of the response
    reward_B: np.ndarray  # float64
    finished_B: np.ndarray  # bool
    behaviour_logps: Lists | None = None  # one per token of the response, where they are asked for
    loss_mask: Lists | None = None  # bools, one per token: whether the policy wrote it; None where it wrote all
    step_ends: Lists | None = None  # tokens after which each step ends, where they are asked for; none if not stored
    step_values: Lists | None = None  # the value of the state before each step, likewise

    def __len__(self) -> int:
        return len(self.trajectory_ids)
