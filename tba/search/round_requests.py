"""Make the requests of a round. Their seeds, temperature and `top_p` depend only on the settings, the searcher and the
round, so that a restarted searcher submits the same requests."""

from collections.abc import Sequence
from random import Random

from tba.config import SearchConfig
from tba.search.open_rounds import Group
from tba.seeds import request_seed
from tba.types import Request


def make_requests(
    groups: Sequence[Group], config: SearchConfig, *, seed: int, searcher: int
) -> dict[Request, tuple[Group, int]]:
    """Return a request for each slot of a round's groups, with the group and the slot that its response belongs to."""
    temperature, top_p = sampling_of_round(groups[0].round, config, seed=seed, searcher=searcher)
    return {
        Request(
            prompt=group.prompt,
            seed=request_seed(seed, searcher, group.round, slot),
            limit=config.max_response_tokens,
            temperature=temperature,
            top_p=top_p,
        ): (group, slot)
        for group in groups
        for slot in group.slots
    }


def sampling_of_round(round: int, config: SearchConfig, *, seed: int, searcher: int) -> tuple[float, float]:
    """Return the temperature and `top_p` of a round. Each of the two is replaced, with probability
    `search.explore_share`, by a random value from its range of exploration, as in the paper."""
    chance = Random(request_seed(seed, searcher, round, -1))
    warmer, narrower, how_warm, how_narrow = (chance.random() for _ in range(4))
    low, high = config.explored_temperatures
    return (
        low + (high - low) * how_warm if warmer < config.explore_share else config.temperature,
        1 - (1 - config.explore_top_p) * how_narrow if narrower < config.explore_share else config.top_p,
    )
