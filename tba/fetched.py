"""Drawn trajectories as columns of NumPy arrays. Storage returns these columns, and `tba.batches` makes a batch of
them. Columns avoid one Python object per row or number."""
# Shapes: B rows, N elements of all rows together.

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np


class Lists(NamedTuple):
    """One list of numbers per row, stored as one array in which the lists follow each other."""

    elements_N: np.ndarray
    lengths_B: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], dtype: type[np.number]) -> "Lists":
        lengths_B = np.fromiter(map(len, rows), np.int64, count=len(rows))
        return cls(np.fromiter(chain.from_iterable(rows), dtype, count=lengths_B.sum()), lengths_B)

    def first(self, counted_B: np.ndarray) -> "Lists":
        """Return the first `counted_B` elements of each list."""
        ends_B = np.cumsum(self.lengths_B)
        left_N = np.repeat(ends_B - self.lengths_B + counted_B, self.lengths_B)
        return Lists(self.elements_N[np.arange(len(self.elements_N)) < left_N], counted_B)

    def where(self, mask: "Lists | None") -> "Lists":
        """Return the lists with 0 in place of each number for which `mask` is false. The lists of `mask` have the same
        lengths."""
        return self if mask is None else Lists(np.where(mask.elements_N, self.elements_N, 0), self.lengths_B)

    def sums(self) -> np.ndarray:
        """Return the sum of each list, in double precision."""
        row_N = np.repeat(np.arange(len(self.lengths_B)), self.lengths_B)
        return np.bincount(row_N, weights=self.elements_N, minlength=len(self.lengths_B))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The drawn trajectories. Each field has one entry per row, in the order of the draws."""

    trajectory_ids: Sequence[str]
    prompt_ids: Sequence[str]
    prompt_tokens: Lists  # integers
    response_tokens: Lists  # integers, EOS last where finished
    reward_B: np.ndarray  # float64
    finished_B: np.ndarray  # bool
    ref_logps: Lists | None = None  # one per token of the response; None if a row was stored without them
    behaviour_logps: Lists | None = None  # one per token of the response; None if not asked for
    loss_mask: Lists | None = None  # one bool per token: True if the policy wrote it; None if it wrote all tokens
    # The next two are None if they were not asked for. In a row whose values are not stored, they are empty.
    step_ends: Lists | None = None  # number of tokens up to the end of each reasoning step
    step_values: Lists | None = None  # value of the state before each reasoning step

    def __len__(self) -> int:
        return len(self.trajectory_ids)
