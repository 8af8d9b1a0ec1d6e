"""Plans which process is killed, and when."""

import random
from dataclasses import dataclass
from itertools import cycle, islice

POINTS = {
    "shard": ("searcher", "create", r"trajectories/.*"),
    "attempt": ("trainer", "create", r"attempts/.*"),
    "part of a version": ("trainer", "upload", r"versions/.*"),
    "manifest of a version": ("trainer", "create", r"versions/.*"),
    "record": ("trainer", "create", r"syncs/.*"),
    "draws": ("trainer", "create", r"draws/.*"),
    "steps": ("trainer", "create", r"steps/.*"),
    "part of a checkpoint": ("trainer", "upload", r"checkpoints/.*"),
    "manifest of a checkpoint": ("trainer", "create", r"checkpoints/.*"),
    "retention record": ("trainer", "create", r"retention/.*"),
    "removal of a manifest": ("trainer", "delete", r".*/MANIFEST.json"),
    "removal of a part": ("trainer", "delete", r".*(?<!MANIFEST.json)"),
    "scores": ("evaluator", "create", r"evaluations/.*"),
    "compaction": ("compaction", "create", r"compactions/.*\.parquet"),
    "record of a compaction": ("compaction", "create", r"compactions/.*\.json"),
    "removal of a shard": ("compaction", "delete", r"trajectories/.*"),
    "removal of a compaction": ("compaction", "delete", r"compactions/.*\.parquet"),
    "removal of its record": ("compaction", "delete", r"compactions/.*\.json"),
}
"""Writes that publish or remove an object: the role that writes, the operation, and a pattern of the keys."""
MOMENTS = ("before", "during", "after")
ONCE = ("attempt", "scores", *(name for name, (role, _, _) in POINTS.items() if role == "compaction"))
"""Points that a role may pass fewer than three times in one life."""
TRAINING = tuple(name for name, (role, _, _) in POINTS.items() if role == "trainer" and name != "attempt")
"""Points that a trainer passes again and again while it takes steps."""
RANDOM = "a random instant"
IN_TRAINING, AT_ANY_TIME = "in training", "at any time"
"""The two phases of the plan."""
ROLES = ("trainer", "searcher", "evaluator", "compaction")

LONGEST_DELAY = 6.0  # seconds: by then every role has begun its work
TRAINING_DELAY = 0.6  # seconds: a trainer takes the steps of several syncs in this time


@dataclass(frozen=True)
class Kill:
    """A planned SIGKILL. The victim dies at the n-th write of a point, or after some seconds. A kill in training starts
    to count writes or seconds when the victim's attempt has stored `checkpoints` checkpoints."""

    role: str
    point: str
    moment: str = ""
    nth: int = 1
    seconds: float = 0.0
    checkpoints: int = 0

    @property
    def name(self) -> str:
        instant = f"{self.point} of the {self.role}" if self.point == RANDOM else f"{self.moment} {self.point}"
        return f"{self.phase}: {instant}" if self.checkpoints else instant

    @property
    def phase(self) -> str:
        return IN_TRAINING if self.checkpoints else AT_ANY_TIME

    @property
    def process(self) -> str:
        """The role in `ROLES` that is restarted for this kill: the trainer if the victim is its buffer process."""
        return "trainer" if self.role == "reader" else self.role


def kills_in_training(number: int, chance: random.Random) -> list[Kill]:
    """Plan kills of a trainer or its buffer process after the attempt has stored a checkpoint: half of them at writes,
    half at random instants."""
    writes = [(point, moment) for point in TRAINING for moment in MOMENTS]
    kills = [
        Kill("trainer", point, moment, nth=chance.randint(1, 3), checkpoints=chance.randint(1, 2))
        for point, moment in islice(cycle(writes), number - number // 2)
    ]
    kills += [
        Kill(
            chance.choice(("trainer", "trainer", "reader")),
            RANDOM,
            seconds=chance.uniform(0.0, TRAINING_DELAY),
            checkpoints=chance.randint(1, 2),
        )
        for _ in range(number // 2)
    ]
    chance.shuffle(kills)
    return kills


def kills_at_any_time(number: int, chance: random.Random) -> list[Kill]:
    """Plan kills of any role, from the start of its life on: half of them at writes, half at random instants."""
    writes = [(point, moment) for point in POINTS for moment in MOMENTS]
    kills = [
        Kill(POINTS[point][0], point, moment, nth=1 if point in ONCE else chance.randint(1, 3))
        for point, moment in islice(cycle(writes), number - number // 2)
    ]
    kills += [
        Kill(chance.choice(("trainer", "reader", *ROLES)), RANDOM, seconds=chance.uniform(0.1, LONGEST_DELAY))
        for _ in range(number // 2)
    ]
    chance.shuffle(kills)
    return kills


def shares(kills: list[Kill], most: int) -> list[list[Kill]]:
    """Split kills into shares of about equal size, with at most `most` kills each."""
    number = -(-len(kills) // most)
    return [kills[first::number] for first in range(number)]
