"""Random seeds of responses, turns and continuations. Each seed is derived from the run's seed and from the position of
the response, turn or continuation, so that a restart uses the same seeds again."""

import hashlib


def request_seed(seed: int, searcher: int, round: int, slot: int) -> int:
    return seed_of(f"{seed}:response:{searcher}:{round}:{slot}")


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn of the policy, in a response whose seed is `seed`. The policy's turns count from 0, and
    turn 0 has the seed of the response."""
    if turn == 0:
        return seed
    return seed_of(f"{seed}:turn:{turn}")


def continuation_seed(seed: int, tokens: int, number: int) -> int:
    """Return the seed of continuation `number` of a response whose seed is `seed`, cut after `tokens` tokens."""
    return seed_of(f"{seed}:continuation:{tokens}:{number}")


def seed_of(name: str) -> int:
    """Return a seed derived from the name of its purpose. The seed has 63 bits, so that it fits a signed column."""
    return int.from_bytes(hashlib.md5(name.encode()).digest()[:8], "big") >> 1
