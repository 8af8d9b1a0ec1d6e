"""The choice of a token by a uniform number, and the uniform numbers of a seed."""

import numpy as np
import pytest
import torch

from tba.generation.token_choice import choose, uniforms

UNIFORMS = [0.8833108082136427, 0.1859454557748516, 0.8316982391956977]


def test_uniforms_follow_from_seed_and_position_alone():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    grid = uniforms(seeds.ravel(), positions.ravel())
    assert grid.min() > 0 and grid.max() < 1 and len(np.unique(grid)) == grid.size
    assert uniforms(seeds.ravel()[777:778], positions.ravel()[777:778])[0] == grid[777]
    counts = np.histogram(grid, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 100  # chi-square of 49 degrees; p is about 2e-5
    square = grid.reshape(200, 200)
    for one, other in [(square[1:], square[:-1]), (square[:, 1:], square[:, :-1])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


def test_uniforms_never_change():
    """Stored responses can be generated again from their seeds."""
    found = uniforms(np.array([0, 1, 2**63 - 1], dtype=np.uint64), np.array([0, 7, 511], dtype=np.uint64))
    assert found.tolist() == UNIFORMS


def test_evenly_spread_uniforms_choose_tokens_in_proportion_to_their_probability():
    probability = torch.tensor([0.05, 0.5, 0.0, 0.2, 0.25], dtype=torch.float64)
    spread = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    for temperature in (1.0, 0.5):
        logits = (temperature * probability.log()).expand(10_000, -1).float()
        chosen = choose(logits, spread, temperature=temperature, top_p=1.0)
        assert torch.bincount(chosen, minlength=5).tolist() == pytest.approx([500, 5000, 0, 2000, 2500], abs=1)


@pytest.mark.parametrize(
    "top_p, expected", [(0.4, [0, 100, 0, 0]), (0.51, [0, 65, 0, 35]), (0.9, [0, 53, 18, 29]), (1.0, [5, 50, 17, 28])]
)
def test_top_p_keeps_the_fewest_most_likely_tokens_that_reach_it(top_p, expected):
    logits = torch.tensor([0.05, 0.5, 0.17, 0.28], dtype=torch.float64).log().expand(100, -1)
    spread = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    chosen = choose(logits, spread, temperature=1.0, top_p=top_p)
    assert torch.bincount(chosen, minlength=4).tolist() == pytest.approx(expected, abs=2)


def test_temperature_zero_takes_the_most_likely_token():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, -1.0, 0.0]])
    assert choose(logits, torch.tensor([0.001, 0.999]), temperature=0.0, top_p=1.0).tolist() == [1, 0]
