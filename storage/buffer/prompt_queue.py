"""The order in which the slots of a gradient step take prompts. Each prompt of a branch is taken once before any is
taken again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class Queue:
    """The prompts of a branch, by number, and which of them have been drawn since the queue was last refilled. A prompt
    without rows to draw is *empty* and never taken. A prompt that is *held back* is taken only while all prompts that
    are not empty are held back."""

    def __init__(self) -> None:
        self.prompts_P = np.zeros(0, np.int32)  # ascending
        self.used_P = np.zeros(0, bool)
        self.held_back_P = np.zeros(0, bool)
        self.empty_P = np.zeros(0, bool)

    def add(self, prompts: np.ndarray) -> None:
        """Add prompts. Their numbers must be greater than all numbers in the queue."""
        if len(prompts):
            self.prompts_P = np.concatenate([self.prompts_P, prompts.astype(np.int32)])
            self.used_P = np.concatenate([self.used_P, np.zeros(len(prompts), bool)])
            self.held_back_P = np.concatenate([self.held_back_P, np.zeros(len(prompts), bool)])
            self.empty_P = np.concatenate([self.empty_P, np.zeros(len(prompts), bool)])

    def hold_back(self, prompts: np.ndarray, whether: np.ndarray) -> None:
        """Set whether each of these prompts is held back. Prompts that are not in the queue are ignored."""
        self._set(self.held_back_P, prompts, whether)

    def pass_over(self, prompts: np.ndarray, whether: np.ndarray) -> None:
        """Set whether each of these prompts is empty. Prompts that are not in the queue are ignored."""
        self._set(self.empty_P, prompts, whether)

    def _set(self, values_P: np.ndarray, prompts: np.ndarray, whether: np.ndarray) -> None:
        places = np.searchsorted(self.prompts_P, prompts)
        own = np.append(self.prompts_P, -1)[places] == prompts
        values_P[places[own]] = whether[own]

    @property
    def has_none_left(self) -> bool:
        """True if some prompts are not empty, and all of these are held back."""
        return not self.empty_P.all() and bool((self.held_back_P | self.empty_P).all())

    @property
    def open_P(self) -> np.ndarray:
        """For each prompt of the queue, whether slots can take it."""
        return ~self.empty_P if self.has_none_left else ~(self.held_back_P | self.empty_P)

    def turns(self, slots: int, uniform: Callable[[int], float]) -> list[int]:
        """Return the prompts that `slots` slots would take one after the other. Each prompt is chosen uniformly from
        the unused prompts. If none is left, the queue is refilled with all prompts that can be taken. `uniform(turn)`
        returns a number between 0 and 1."""
        open_P = self.open_P
        chosen, unused = [], self.prompts_P[open_P & ~self.used_P]
        left = len(unused)
        for turn in range(slots if open_P.any() else 0):
            if not left:
                unused = self.prompts_P[open_P]
                left = len(unused)
            place = int(uniform(turn) * left)
            chosen.append(int(unused[place]))
            left -= 1
            unused[place] = unused[left]
        return chosen

    def mark_used(self, prompts: Sequence[int]) -> None:
        """Mark these prompts, which were drawn in this order, as used. If a prompt is used already, the queue was
        refilled in between: then only the prompts from this one on are used. Prompts that are not in the queue are
        ignored."""
        places = np.searchsorted(self.prompts_P, prompts)
        for place, prompt in zip(places.tolist(), prompts, strict=True):
            if place == len(self.prompts_P) or self.prompts_P[place] != prompt:
                continue  # a user's sampler may name the branch `recent` for any prompt
            if self.used_P[place]:
                self.used_P[:] = False
            self.used_P[place] = True

    def state(self) -> dict[str, Any]:
        """Return which prompts are used, as one bit per prompt in hexadecimal. Checkpoints store this, so it must be
        small even for many prompts."""
        return {"prompts": len(self.used_P), "used": np.packbits(self.used_P).tobytes().hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state` for the same prompts. Raise ValueError if the state belongs to other
        prompts."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(state["used"]), np.uint8))
        n = len(self.used_P)
        if state["prompts"] != n or len(bits) != (n + 7) // 8 * 8:
            raise ValueError(f"it has {len(bits)} bits of {state['prompts']} prompts, but the records have {n} prompts")
        self.used_P = bits[:n].astype(bool)
