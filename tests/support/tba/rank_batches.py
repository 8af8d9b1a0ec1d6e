"""Batches whose groups have very different lengths, for tests of ranks."""

from dataclasses import replace
from random import Random

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, trajectory
from tba.batches.batching import Batch, collate

P, K = 5, 3


def batch_at(step: int) -> Batch:
    """Return a batch of groups of very different lengths."""
    chance = Random(step)
    rows = [
        trajectory(
            prompt_id=f"p{group}",
            prompt_tokens=(5, 6, *range(10, 10 + group)),
            response_tokens=(*(chance.randrange(10, 60) for _ in range(chance.randrange(1, 4 + 6 * group))), EOS_ID),
            reward=float(chance.random() < 0.5),
        )
        for group in range(P)
        for _ in range(K)
    ]
    same = [replace(row, ref_logps=(-1.5,) * row.length, behaviour_logps=(-1.0,) * row.length) for row in rows]
    return collate(fetched_of(same), responses_per_prompt=K, pad_id=PAD_ID, include_eos=True, by_token=True)
