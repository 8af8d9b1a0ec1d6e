"""The queues of prompts, one per branch: which prompts a gradient step can take, and in which order its slots take
them."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import md5
from typing import Any

import numpy as np
import pyarrow as pa

from storage.buffer.drawable_rows import DrawableRows
from storage.buffer.prompt_queue import Queue
from storage.buffer.sampler import BRANCHES
from tba.errors import Damaged
from tba.types import Branch

Turns = Mapping[Branch, Sequence[int]]
"""For each branch, the prompts that the slots of a gradient step would take, in order."""


class BranchQueues:
    """The queues of all branches. If `mean_reward_between` has two bounds, prompts whose mean reward is not strictly
    between them are held back."""

    def __init__(self, *, seed: int, slots: int, mean_reward_between: tuple[float, float] | None = None):
        self.by_branch: dict[Branch, Queue] = {branch: Queue() for branch in BRANCHES}
        self.mean_reward_between = mean_reward_between
        self._seed, self._slots = seed, slots

    def admit(self, recent: np.ndarray, prompts: int) -> None:
        """Add the prompts of a sync record. `recent` has the numbers of these prompts in ascending order. `prompts` is
        the number of all prompts of the index, including these."""
        prioritised = self.by_branch["prioritised"]
        prioritised.add(np.arange(len(prioritised.prompts_P), prompts))
        self.by_branch["recent"] = Queue()
        self.by_branch["recent"].add(recent)

    def judge(self, prompts_P: np.ndarray, pool: DrawableRows, first_recent: int) -> None:
        """Update the queues for these prompts, whose rows have changed: which of them have nothing to draw now, and
        which have a mean reward outside the bounds. The rows of the newest record begin at the place `first_recent`."""
        if pool.max_age is not None:
            newest_P = pool.newest_places(prompts_P.tolist())
            self.by_branch["prioritised"].pass_over(prompts_P, newest_P < 0)
            self.by_branch["recent"].pass_over(prompts_P, newest_P < first_recent)
        if self.mean_reward_between is not None:
            low, high = self.mean_reward_between
            outside_P = np.array([not low < mean < high for mean in pool.mean_rewards(prompts_P.tolist())])
            for queue in self.by_branch.values():
                queue.hold_back(prompts_P, outside_P)

    def without_bounds(self) -> set[Branch]:
        """Return the branches that ignore the bounds, because none of their prompts is within the bounds."""
        return {branch for branch, queue in self.by_branch.items() if queue.has_none_left}

    def turns(self, step: int) -> Turns:
        return {branch: self._turns(step, branch) for branch in BRANCHES}

    def _turns(self, step: int, branch: Branch) -> list[int]:
        def uniform(turn: int) -> float:
            text = f"{self._seed}:prompt:{step}:{branch}:{turn}"
            digits = md5(text.encode(), usedforsecurity=False).hexdigest()[:13]
            return (int(digits, 16) + 0.5) / 2**52

        return self.by_branch[branch].turns(self._slots, uniform)

    def mark_used(self, drawn: Iterable[tuple[Branch, int]]) -> None:
        """Mark the drawn prompts as used. `drawn` has the branch and the prompt of each slot, in the order of the
        slots."""
        pairs = list(drawn)
        for branch, queue in self.by_branch.items():
            queue.mark_used([prompt for drawn_by, prompt in pairs if drawn_by == branch])

    def table(self, prompt_ids: Sequence[str]) -> pa.Table:
        """Return the prompts that slots can take, as the table `queue` of `storage.buffer.sampler`."""
        names = pa.array(prompt_ids, pa.string())
        return pa.concat_tables(
            pa.table(
                {
                    "branch": pa.array([branch]).take(pa.array(np.zeros(len(prompts), np.int32))),
                    "prompt_id": names.take(pa.array(prompts)),
                    "prompt": prompts,
                    "used": queue.used_P[queue.open_P],
                }
            )
            for branch, queue in self.by_branch.items()
            for prompts in [queue.prompts_P[queue.open_P]]
        )

    def state(self) -> dict[str, Any]:
        """Return, for each branch, which prompts have been drawn since its queue was last refilled."""
        return {branch: queue.state() for branch, queue in self.by_branch.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the result of `state`. Raise Damaged, naming the queue, if a state belongs to other sync records."""
        for branch, queue in self.by_branch.items():
            try:
                queue.restore(states[branch])
            except (KeyError, TypeError, ValueError) as error:
                raise Damaged(f"queue {branch!r} cannot be restored: {error}") from None


def turns_table(turns: Turns, prompt_ids: Sequence[str]) -> pa.Table:
    """Return the turns of a gradient step as the table `turns` of `storage.buffer.sampler`."""
    rows = [(branch, turn, prompt) for branch in BRANCHES for turn, prompt in enumerate(turns[branch])]
    return pa.table(
        {
            "branch": [branch for branch, _, _ in rows],
            "turn": [turn for _, turn, _ in rows],
            "prompt_id": [prompt_ids[prompt] for _, _, prompt in rows],
            "prompt": [prompt for _, _, prompt in rows],
        }
    )
