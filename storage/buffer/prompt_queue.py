"""In which order the slots of a step take prompts: each prompt of a branch once before any of them again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class Queue:
    """The prompts that a branch can take, by number, and which of them have been drawn since it was last refilled. Some
    are held back for as long as others are not; where all would be, none is. Empty ones are passed over in any case."""

    def __init__(self) -> None:
        self.prompts_P = np.zeros(0, np.int32)  # ascending
        self.used_P = np.zeros(0, bool)
        self.held_back_P = np.zeros(0, bool)
        self.empty_P = np.zeros(0, bool)

    def add(self, prompts: np.ndarray) -> None:
        """Prompts with numbers greater than any here."""
        if len(prompts):
            self.prompts_P = np.concatenate([self.prompts_P, prompts.astype(np.int32)])
            self.used_P = np.concatenate([self.used_P, np.zeros(len(prompts), bool)])
            self.held_back_P = np.concatenate([self.held_back_P, np.zeros(len(prompts), bool)])
            self.empty_P = np.concatenate([self.empty_P, np.zeros(len(prompts), bool)])

    def hold_back(self, prompts: np.ndarray, whether: np.ndarray) -> None:
        """Those of these prompts that are its own."""
        self._set(self.held_back_P, prompts, whether)

    def pass_over(self, prompts: np.ndarray, whether: np.ndarray) -> None:
        """Likewise, as there is nothing of them to draw."""
        self._set(self.empty_P, prompts, whether)

    def _set(self, values_P: np.ndarray, prompts: np.ndarray, whether: np.ndarray) -> None:
        places = np.searchsorted(self.prompts_P, prompts)
        own = np.append(self.prompts_P, -1)[places] == prompts
        values_P[places[own]] = whether[own]

    @property
    def has_none_left(self) -> bool:
        """Whether all would be held back."""
        return not self.empty_P.all() and bool((self.held_back_P | self.empty_P).all())

    @property
    def open_P(self) -> np.ndarray:
        """Whether slots can take each prompt."""
        return ~self.empty_P if self.has_none_left else ~(self.held_back_P | self.empty_P)

    def turns(self, slots: int, uniform: Callable[[int], float]) -> list[int]:
        """The prompts that so many slots would take one after the other, uniformly among the unused ones, and among
        all of them again whenever there are no more. `uniform(turn)` is a number between 0 and 1."""
        open_P = self.open_P
        taken, unused = [], self.prompts_P[open_P & ~self.used_P]
        left = len(unused)
        for turn in range(slots if open_P.any() else 0):
            if not left:
                unused = self.prompts_P[open_P]
                left = len(unused)
            place = int(uniform(turn) * left)
            taken.append(int(unused[place]))
            left -= 1
            unused[place] = unused[left]
        return taken

    def take(self, prompts: Sequence[int]) -> None:
        """They were drawn, in this order. One that had been already shows that the queue was refilled."""
        places = np.searchsorted(self.prompts_P, prompts)
        for place, prompt in zip(places.tolist(), prompts, strict=True):
            if place == len(self.prompts_P) or self.prompts_P[place] != prompt:
                continue  # a user's sampler may call recent what it likes
            if self.used_P[place]:
                self.used_P[:] = False
            self.used_P[place] = True

    def state(self) -> dict[str, Any]:
        """Whether each prompt is used, a bit each in hexadecimal: checkpoints hold it, whatever number of prompts."""
        return {"prompts": len(self.used_P), "used": np.packbits(self.used_P).tobytes().hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` once gave of the same prompts; ValueError if it did not."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(state["used"]), np.uint8))
        n = len(self.used_P)
        if state["prompts"] != n or len(bits) != (n + 7) // 8 * 8:
            raise ValueError(f"it is of {state['prompts']} prompts, the records have {n}")
        self.used_P = bits[:n].astype(bool)
