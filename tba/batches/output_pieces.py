"""How much of the output layer is computed at once, and how much memory this takes."""
# Shapes: V vocabulary.

from typing import NamedTuple

KEPT_BYTES = 2**29
"""Bytes of logits that are kept for the backward pass. The backward pass computes all other logits again, which takes a
third of the output layer's time."""


class Pieces(NamedTuple):
    """How much the output layer computes in one operation."""

    projected: int
    """Number of logits that are computed together. It gives enough rows for a fast matrix product."""
    summed: int
    """Number of such products whose part of the weights' gradient is computed together, if it is summed in another type
    than that of the products. Each sum reads and writes all weights, which takes longer than a product of few rows."""
    normalised: int
    """Number of logits that are normalised together."""

    def rows(self, vocabulary: int) -> int:
        """Return the number of rows of a product."""
        return max(1, self.projected // vocabulary)

    def forward_bytes(self, rows: int, vocabulary: int, *, number: int) -> int:
        """Return the bytes that are held at most while log-probabilities of so many rows are computed, without the
        logits that are kept: the logits of a product, with `number` bytes each, and a part of them twice in float32
        while it is normalised."""
        return vocabulary * (min(rows, self.rows(vocabulary)) * number + self._normalised_rows(rows, vocabulary) * 8)

    def backward_bytes(self, rows: int, vocabulary: int, *, number: int) -> int:
        """Return the same of the backward pass, which holds the gradients of logits of several products, if it sums in
        float32 what has fewer bytes. Gradients of weights are not counted."""
        together = min(rows, self.rows(vocabulary) * (self.summed if number < 4 else 1))
        return vocabulary * (together * number + self._normalised_rows(rows, vocabulary) * 8)

    def _normalised_rows(self, rows: int, vocabulary: int) -> int:
        return min(rows, max(1, self.normalised // vocabulary))


ON_CPU = Pieces(projected=2**23, summed=8, normalised=2**20)
"""So few logits are normalised together that they stay in the cache, where normalising is several times faster."""
ON_GPU = Pieces(projected=2**28, summed=2, normalised=2**26)
"""An operation takes about 10 microseconds to start, so each has more work than that. With a vocabulary of 152,000
tokens a product has 1,766 rows, and the gradient of the weights is added up every 3,532 rows. Fewer logits are
normalised together, since these are held twice in float32: an operation reads or writes 256 MiB of them, which takes
the memory of a GPU 100 microseconds."""
