"""Seeds of responses, turns and continuations. Each follows from settings and place alone, so a restart repeats it."""

import hashlib


def request_seed(seed: int, searcher: int, round: int, slot: int) -> int:
    """The seed of one response."""
    return seed_of(f"{seed}:response:{searcher}:{round}:{slot}")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a later turn of a response, counted from 0; the first turn has the response's own."""
    if turn == 0:
        return seed
    return seed_of(f"{seed}:turn:{turn}")


def continuation_seed(seed: int, tokens: int, number: int) -> int:
    """The seed of a continuation, one of several, of what a response is after so many tokens."""
    return seed_of(f"{seed}:continuation:{tokens}:{number}")


def seed_of(name: str) -> int:
    """By the name of what it is for: 63 bits, so that it fits a signed column."""
    return int.from_bytes(hashlib.md5(name.encode()).digest()[:8], "big") >> 1
