"""The sampler again, in plain Python: slot by slot, each computed from scratch. It is slow, but clearly the definition.

Random numbers are u(parts) = (first 13 hexadecimal digits of md5("part:part:…") + 1/2) / 2^52.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import md5
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from tba.types import Draw

SHARD = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "prompt d"]),
        st.integers(0, 5),  # number of the response: equal numbers are equal content
        st.floats(-3, 3),
    ),
    min_size=1,
    max_size=6,
)
"""Prompt, response and reward of each trajectory in a shard."""


class Row(NamedTuple):
    """A trajectory, as far as draws depend on it."""

    trajectory_id: str
    prompt_id: str
    content: str
    reward: float
    version_step: int = 0


class Drawn(NamedTuple):
    slot: int
    position: int
    trajectory_id: str
    prompt_id: str
    branch: str
    weight: float


def digest(*parts: object) -> str:
    return md5(":".join(map(str, parts)).encode()).hexdigest()


def u(*parts: object) -> float:
    return (int(digest(*parts)[:13], 16) + 0.5) / 2**52


@dataclass(kw_only=True)
class Oracle:
    seed: int = 0
    slots: int
    responses: int
    recent_share: float
    inv_temp: float = 0.0
    capacity: int = 100
    evict: str = "oldest"
    copies: str = "newest"
    max_age: float = math.inf
    mean_reward_between: tuple[float, float] | None = None
    entered: list[tuple[int, Row]] = field(default_factory=list)  # all rows with their sync, in order
    passed_over: set[int] = field(default_factory=set)  # places of rows that were too old when they entered
    used: dict[str, set[str]] = field(default_factory=lambda: {"recent": set(), "prioritised": set()})

    def admit(self, sync: int, rows: Sequence[Row], step: int = 0) -> None:
        """Admit a record after a step, with rows in the order (searcher, seq, row)."""
        places = range(len(self.entered), len(self.entered) + len(rows))
        self.entered += [(sync, row) for row in rows]
        self.passed_over |= {place for place in places if not self.is_young(self.entered[place][1], step + 1)}
        if rows:
            self.used["recent"] = set()

    @property
    def newest(self) -> int:
        return self.entered[-1][0]

    def is_young(self, row: Row, step: int) -> bool:
        """Return True if the row's age at a step is at most `max_age`."""
        return step - 1 - row.version_step <= self.max_age

    def drawable(self, prompt_id: str, step: int) -> list[tuple[int, Row]]:
        return [(sync, row) for sync, row in self.surviving(prompt_id) if self.is_young(row, step)]

    def surviving(self, prompt_id: str) -> list[tuple[int, Row]]:
        """Return the rows of a prompt that are not evicted, newest first.

        Rows that were too old when they entered are left out. Of equal contents the newest copy counts, or all copies.
        Of these, the newest `capacity` stay. If the worst are evicted instead, the `capacity` rows with the highest
        reward of any of their copies stay, and all rows of the prompt's newest record."""
        copies: dict[str, list[tuple[int, int, Row]]] = {}
        for place, (sync, row) in enumerate(self.entered):
            if row.prompt_id == prompt_id and place not in self.passed_over:
                same = row.content if self.copies == "newest" else str(place)
                copies.setdefault(same, []).append((place, sync, row))
        newest = sorted((found[-1] for found in copies.values()), reverse=True)
        best = {found[-1][0]: max((row.reward, place) for place, _, row in found) for found in copies.values()}
        by_rank = sorted(newest, key=lambda it: best[it[0]], reverse=True) if self.evict == "worst" else newest
        staying = {place for place, _, _ in by_rank[: self.capacity]}
        if self.evict == "worst":
            staying |= {place for place, sync, _ in newest if sync == newest[0][1]}
        return [(sync, row) for place, sync, row in newest if place in staying]

    def draw(self, step: int) -> list[Drawn]:
        shares = [u(self.seed, "branch", step, slot) for slot in range(self.slots)]
        recents = [row for _, row in self.entered for it, _ in self.drawable(row.prompt_id, step) if it == self.newest]
        recent_share = self.recent_share if recents else 0.0
        branches = ["recent" if share < recent_share else "prioritised" for share in shares]
        drawn = []
        for slot, (branch, prompt_id) in enumerate(zip(branches, self.take_prompts(step, branches), strict=True)):
            drawn += self.take_responses(step, slot, branch, prompt_id)
        return drawn

    def take_prompts(self, step: int, branches: Sequence[str]) -> list[str]:
        """Return the prompt of each slot.

        The prompts of a branch have rows that can be drawn, with a mean reward within the bounds; if no prompt is
        within the bounds, all of them count. A branch picks among its unused prompts, and starts again with all of
        them when none is left. They stand in the order in which they first entered, and the last one takes the place
        of the picked one."""
        taken, turns, unused = [], {"recent": 0, "prioritised": 0}, {}
        for branch in branches:
            prompts = dict.fromkeys(row.prompt_id for _, row in self.entered)
            syncs = {it: [sync for sync, _ in self.drawable(it, step)] for it in prompts}
            in_order = [it for it in prompts if (syncs[it] if branch == "prioritised" else self.newest in syncs[it])]
            in_order = [it for it in in_order if self.is_within(it, step)] or in_order
            if branch not in unused:
                unused[branch] = [it for it in in_order if it not in self.used[branch]]
            if not unused[branch]:
                unused[branch] = in_order
                self.used[branch] = set()
            place = int(u(self.seed, "prompt", step, branch, turns[branch]) * len(unused[branch]))
            taken.append(unused[branch][place])
            self.used[branch].add(taken[-1])
            unused[branch][place] = unused[branch][-1]
            unused[branch].pop()
            turns[branch] += 1
        return taken

    def is_within(self, prompt_id: str, step: int) -> bool:
        if self.mean_reward_between is None:
            return True
        rewards = [Fraction(row.reward) for _, row in self.drawable(prompt_id, step)]
        low, high = self.mean_reward_between
        return low < float(sum(rewards) / len(rewards)) < high

    def take_responses(self, step: int, slot: int, branch: str, prompt_id: str) -> list[Drawn]:
        stored = self.drawable(prompt_id, step)
        if branch == "recent":
            log_weights = {row.trajectory_id: 0.0 for sync, row in stored if sync == self.newest}
        else:
            log_weights = {row.trajectory_id: self.inv_temp * row.reward for _, row in stored}
        heaviest = max(log_weights.values())
        log_weights = {it: weight - heaviest for it, weight in log_weights.items()}
        total = math.fsum(math.exp(weight) for weight in log_weights.values())

        def ranking(trial: int) -> list[str]:
            def key(it: str) -> tuple[float, str]:
                return log_weights[it] - math.log(-math.log(u(self.seed, "response", step, slot, trial, it))), it

            return sorted(log_weights, key=key, reverse=True)

        if len(log_weights) >= self.responses:
            chosen = ranking(0)[: self.responses]
        else:
            chosen = [ranking(trial)[0] for trial in range(self.responses)]
        return [
            Drawn(slot, position, it, prompt_id, branch, math.exp(log_weights[it]) / total)
            for position, it in enumerate(chosen)
        ]


def assert_same(draws: Sequence[Draw], expected: Sequence[Drawn], step: int) -> None:
    assert [(d.step, d.slot, d.position, d.trajectory_id, d.prompt_id, d.branch) for d in draws] == [
        (step, *drawn[:5]) for drawn in expected
    ]
    assert [d.weight for d in draws] == pytest.approx([drawn.weight for drawn in expected], rel=1e-9)
