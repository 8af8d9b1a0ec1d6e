"""Replay buffers with few slots and little capacity, and runs that train with them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.log.trajectories import Trajectories
from storage.runs.events import read_events
from storage.runs.run import Run
from tba.types import Draw, Trajectory
from tests.support.builders import make_shard
from tests.support.storage import indexes
from tests.support.storage.indexes import Sections, make_eligibility

SLOTS, RESPONSES, CAPACITY = 3, 2, 8
SECTIONS = Sections(
    prompts_per_step=SLOTS, responses_per_prompt=RESPONSES, inv_temp=1.0, eligibility=make_eligibility(CAPACITY)
)


def make_buffer(run: Run, *, attempt: int = 1, **changes: Any) -> DuckReplayBuffer:
    """Make a buffer with SECTIONS, except the fields in `changes`, and with the options of `indexes.make_buffer`."""
    fields = {name: changes.pop(name) for name in [*changes] if hasattr(SECTIONS, name)}
    return indexes.make_buffer(run, replace(SECTIONS, **fields), attempt=attempt, **changes)


def append(run: Run, shard: Sequence[Trajectory]) -> str:
    return Trajectories(run).append(shard[0].searcher, shard[0].round, shard)


def arrivals(round: int) -> list[list[Trajectory]]:
    """Return the shards of two searchers in a round."""
    return [
        make_shard({f"p{(3 * round + n) % 5}": [round + s / 2, -1.0, 0.5] for n in range(3)}, searcher=s, round=round)
        for s in range(2)
    ]


def train(run: Run, buffer: DuckReplayBuffer, syncs: Sequence[int]) -> list[list[Draw]]:
    """Draw two steps before each sync except sync 0. Two searchers append a round before each sync."""
    draws = []
    for sync in syncs:
        if sync:
            draws += [buffer.draw(2 * sync - 1), buffer.draw(2 * sync)]
        if not buffer.recorded(sync):
            for shard in arrivals(sync):
                append(run, shard)
        buffer.sync(sync, step=2 * sync)
    return draws


def kinds(run: Run) -> list[str]:
    return [event["kind"] for event in read_events(run)]
