"""The rows of the index: the light columns of every admitted trajectory, and which rows of each prompt can be drawn.

Rows lie in the order in which they entered, in pieces that are never moved. A list per prompt holds the places of the
prompt's rows. So the cost of a sync record depends only on the rows of its prompts, and the cost of a draw only on what
it draws, not on how much is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import nan
from statistics import mean
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tba.types import Eligibility, Version

PIECE = 1 << 20  # rows in a piece; the operating system provides memory only for the part that was written to

_ROW = {
    "prompt": "i4", "shard": "i4", "row": "i4", "version": "i4", "length": "i4", "finished": "u1", "drawable": "u1",
    "reward": "f8", "content": "V16",
}  # fmt: skip
_BEST = {"best": "i4"}  # only if the worst are evicted: place of the highest reward of the row and its earlier copies
_SHARD = {"searcher": "i4", "seq": "i4", "sync": "i4"}
_VERSION = {"number": "i4", "attempt": "i4", "step": "i4"}

Columns = dict[str, np.ndarray]


class GrowingTable:
    """A table of numbers to which rows can be appended."""

    def __init__(self, types: Mapping[str, str], piece: int):
        self.types, self.piece = types, piece
        self.pieces: list[Columns] = []
        self.rows = 0

    def __len__(self) -> int:
        return self.rows

    def append(self, columns: Columns) -> None:
        rows = len(next(iter(columns.values())))
        done = 0
        while done < rows:
            if self.rows == len(self.pieces) * self.piece:
                self.pieces.append({name: np.empty(self.piece, type) for name, type in self.types.items()})
            start = self.rows % self.piece
            n = min(rows - done, self.piece - start)
            for name, values in self.pieces[-1].items():
                values[start : start + n] = columns[name][done : done + n]
            done += n
            self.rows += n

    def rows_at(self, places_N: np.ndarray, names: Sequence[str] = ()) -> Columns:
        """Return the rows at these places, with the named columns, or with all columns if no name is given."""
        piece_N, within_N = np.divmod(places_N, self.piece)
        columns = {name: np.empty(len(places_N), self.types[name]) for name in names or self.types}
        for piece in np.unique(piece_N).tolist():
            at = np.flatnonzero(piece_N == piece)
            for name, values in columns.items():
                values[at] = self.pieces[piece][name][within_N[at]]
        return columns

    def set(self, name: str, places_N: np.ndarray, values: int | Sequence[int]) -> None:
        values_N = np.broadcast_to(values, places_N.shape)
        for piece in np.unique(places_N // self.piece).tolist():
            here_N = places_N // self.piece == piece
            self.pieces[piece][name][places_N[here_N] % self.piece] = values_N[here_N]

    def filled(self) -> Iterator[Columns]:
        """Yield all rows, piece by piece, without copying them."""
        for number, piece in enumerate(self.pieces):
            yield {name: values[: self.rows - number * self.piece] for name, values in piece.items()}


class Arrival(NamedTuple):
    """A shard that a sync record admits."""

    searcher: int
    seq: int
    rows: int


class DrawableRows:
    """All rows of the index, and for each prompt the rows that it has room for.

    Rows with equal prompt and content are copies. Of copies, only the newest can be drawn, unless `copies` is "all". A
    prompt has room for `capacity` rows. If `evict` is "oldest", it keeps its newest rows. If `evict` is "worst", it
    keeps the rows with the highest reward, and all rows from its newest sync record; a row counts with the highest
    reward that any of its copies ever had.

    So an evicted row stays out until its content arrives again, even if the reward varies between copies. A smaller
    `capacity` keeps a subset of the rows. After a sync record, each of its prompts has rows of that record to draw.

    If ages are bounded, a row that is too old when it enters is ignored, as if it had not arrived. A row that becomes
    too old later cannot be drawn any more, but still takes up room. The rows that could use this room entered earlier,
    and so they are even older, unless a late searcher generated the row.
    """

    def __init__(self, eligibility: Eligibility):
        self.capacity, self.evict, self.copies = eligibility.capacity, eligibility.evict, eligibility.copies
        self.max_age = eligibility.max_age
        self.rows, self.shards, self.versions = (
            GrowingTable(_ROW if self.evict == "oldest" else _ROW | _BEST, PIECE),
            GrowingTable(_SHARD, 1 << 14),
            GrowingTable(_VERSION, 1 << 10),
        )
        self.prompt_ids: list[str] = []
        self.held: list[bytes] = []  # by prompt: the places of the rows that it has room for, int32, oldest first
        self.young: dict[int, list[np.ndarray]] = {}  # by version that is not too old: prompts of its rows, by record

    def add_version(self, version: Version, step: int) -> None:
        numbers = {"number": version.number, "attempt": version.attempt, "step": step}
        self.versions.append({name: np.array([number]) for name, number in numbers.items()})

    def extend(self, sync: int, shards: Sequence[Arrival], columns: Columns, *, step: int) -> list[range]:
        """Admit the shards of a sync record, and return the places of each shard's rows. `columns` has all their rows
        in order: prompt, version, length, finished, reward, content. New prompts and versions must have been added
        before. `step` is the gradient step that the sync follows."""
        first, known = len(self.rows), len(self.shards)
        searchers, seqs, rows = np.array(shards).T
        starts = np.cumsum(rows) - rows
        young_N = self._is_young(columns["version"], step + 1)
        self.shards.append({"searcher": searchers, "seq": seqs, "sync": np.full(len(shards), sync)})
        self.rows.append(
            {
                **columns,
                "shard": np.repeat(np.arange(known, known + len(shards)), rows),
                "row": np.arange(rows.sum()) - np.repeat(starts, rows),
                "drawable": young_N,
                "best": np.arange(first, first + rows.sum()),
            }
        )
        self.held += [b""] * (len(self.prompt_ids) - len(self.held))
        if young_N.any():
            self._choose(first, first + np.flatnonzero(young_N), columns["prompt"][young_N])
            self._note_versions(columns["version"][young_N], columns["prompt"][young_N])
        return [range(start, start + n) for start, n in zip((first + starts).tolist(), rows.tolist(), strict=True)]

    def _choose(self, first: int, new_N: np.ndarray, arrived_N: np.ndarray) -> None:
        """Choose which rows the prompts of a new sync record have room for. `new_N` has the places of the record's rows
        that are not too old, and `arrived_N` their prompts. All rows of the record begin at the place `first`."""
        prompts = np.unique(arrived_N).tolist()
        old_N, counts = self._held(prompts)
        places_N = np.concatenate([old_N, new_N.astype(np.int32)])
        prompt_N = np.concatenate([np.repeat(np.array(prompts, np.int32), counts), arrived_N])
        chosen_N = self._newest_copies(places_N, prompt_N, len(old_N))
        chosen_N[chosen_N] = self._have_room(places_N[chosen_N], prompt_N[chosen_N], first)
        by_prompt_N = np.argsort(prompt_N, kind="stable")  # by prompt, the oldest rows of each first
        by_prompt_N = by_prompt_N[chosen_N[by_prompt_N]]
        ends = np.cumsum(np.unique(prompt_N[by_prompt_N], return_counts=True)[1]).tolist()
        for prompt, (start, end) in zip(prompts, pairwise([0, *ends]), strict=True):
            self.held[prompt] = places_N[by_prompt_N[start:end]].tobytes()
        self.rows.set("drawable", places_N[~chosen_N], 0)

    def _have_room(self, places_N: np.ndarray, prompt_N: np.ndarray, first: int) -> np.ndarray:
        """Return, for each row, whether its prompt has room for it. The rows of the new sync record begin at the place
        `first`."""
        keys = [places_N, prompt_N]
        if self.evict == "worst":
            best_N = self.rows.rows_at(places_N, ["best"])["best"]
            keys = [best_N, self.rows.rows_at(best_N, ["reward"])["reward"], prompt_N]
        leaving_N = np.lexsort(keys)  # by prompt, the rows of each in the order in which they are evicted
        counts = np.unique(prompt_N, return_counts=True)[1]
        stay_N = np.arange(len(places_N)) >= np.repeat(np.cumsum(counts), counts) - self.capacity
        have_room_N = np.empty(len(places_N), bool)
        have_room_N[leaving_N] = stay_N
        return have_room_N | (places_N >= first) if self.evict == "worst" else have_room_N

    def _newest_copies(self, places_N: np.ndarray, prompt_N: np.ndarray, old: int) -> np.ndarray:
        """Return, for each row, whether it is the newest of its copies. No two of the first `old` rows are copies."""
        if self.copies == "all":
            return np.ones(len(places_N), bool)
        content_N = self.rows.rows_at(places_N, ["content"])["content"]
        half_N = np.ascontiguousarray(content_N).view(np.uint64)[::2]
        arrived = np.sort(half_N[old:])
        suspects = half_N[:old] == arrived[np.minimum(np.searchsorted(arrived, half_N[:old]), len(arrived) - 1)]
        looked_at = np.concatenate([np.flatnonzero(suspects), np.arange(old, len(places_N))])
        keys = list(zip(prompt_N[looked_at].tolist(), content_N[looked_at].tolist(), strict=True))
        last = dict(zip(keys, looked_at.tolist(), strict=True))
        if self.evict == "worst":
            self._pass_on_the_best(keys, places_N[looked_at])
        chosen_N = np.ones(len(places_N), bool)
        chosen_N[looked_at] = False
        chosen_N[list(last.values())] = True
        return chosen_N

    def _pass_on_the_best(self, keys: Sequence[tuple[int, bytes]], places_N: np.ndarray) -> None:
        """Among copies (rows with equal keys), set `best` of the newest row to the place with the highest reward."""
        best_N = self.rows.rows_at(places_N, ["best"])["best"]
        reward_N = self.rows.rows_at(best_N, ["reward"])["reward"]
        highest: dict[tuple[int, bytes], tuple[float, int]] = {}
        for key, reward, place in zip(keys, reward_N.tolist(), best_N.tolist(), strict=True):
            highest[key] = max(highest.get(key, (reward, place)), (reward, place))
        last = dict(zip(keys, places_N.tolist(), strict=True))
        self.rows.set("best", np.array([last[key] for key in highest]), [place for _, place in highest.values()])

    def _held(self, prompts: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Return the places of the rows that these prompts have room for, and the number of rows of each prompt."""
        lists = [self.held[prompt] for prompt in prompts]
        return np.frombuffer(b"".join(lists), np.int32), [len(places) // 4 for places in lists]

    def places(self, prompts: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Return the places of these prompts' rows that can be drawn, and the number of rows of each prompt."""
        places_N, counts = self._held(prompts)
        if self.max_age is None:
            return places_N, counts
        drawable_N = self.rows.rows_at(places_N, ["drawable"])["drawable"] == 1
        of_N = np.repeat(np.arange(len(counts)), counts)[drawable_N]
        return places_N[drawable_N], np.bincount(of_N, minlength=len(counts)).tolist()

    def newest_places(self, prompts: Sequence[int]) -> np.ndarray:
        """Return, for each prompt, the place of its newest row that can be drawn; -1 if there is none."""
        places_N, counts = self.places(prompts)
        ends = accumulate(counts)
        return np.array([places_N[end - 1] if n else -1 for n, end in zip(counts, ends, strict=True)], np.int64)

    def mean_rewards(self, prompts: Sequence[int]) -> list[float]:
        """Return, for each prompt, the mean reward of its rows that can be drawn; NaN if it has none. Only the result
        is rounded, so the order of rows does not matter, and the mean of equal rewards is exactly that reward."""
        places_N, counts = self.places(prompts)
        rewards = self.rows.rows_at(places_N, ["reward"])["reward"].tolist()
        return [mean(rewards[start:end] or [nan]) for start, end in pairwise(accumulate(counts, initial=0))]

    # --- age --------------------------------------------------------------------------------------------------------

    def _is_young(self, version_N: np.ndarray, step: int) -> np.ndarray:
        """Return, for rows of these versions, whether their age at a gradient step is within the bound."""
        if self.max_age is None:
            return np.ones(len(version_N), bool)
        versions_U, which_N = np.unique(version_N, return_inverse=True)
        return (step - 1 - self.versions.rows_at(versions_U, ["step"])["step"] <= self.max_age)[which_N]

    def _note_versions(self, version_N: np.ndarray, prompt_N: np.ndarray) -> None:
        if self.max_age is not None:
            for version in np.unique(version_N).tolist():
                self.young.setdefault(version, []).append(prompt_N[version_N == version])

    def grow_old(self, step: int) -> np.ndarray:
        """Exclude the rows that are too old at a gradient step from the draws of this step and of all later ones.
        Return the prompts of the rows that have become too old since the last call."""
        versions = np.array(list(self.young), np.int64)
        too_old = [self.young.pop(version) for version in versions[~self._is_young(versions, step)].tolist()]
        if not too_old:
            return np.zeros(0, np.int32)
        prompts_P = np.unique(np.concatenate([prompts for records in too_old for prompts in records]))
        places_N, _ = self._held(prompts_P.tolist())
        young_N = self._is_young(self.rows.rows_at(places_N, ["version"])["version"], step)
        self.rows.set("drawable", places_N[~young_N], 0)
        return prompts_P

    def count_young(self, step: int) -> int:
        """Count the rows that `sampling.max_age`, which must be set, allows at a step, whatever the capacity."""
        versions = np.array(list(self.young), np.int64)
        young = versions[self._is_young(versions, step)].tolist()
        return sum(len(prompts) for version in young for prompts in self.young[version])

    # --- as tables ------------------------------------------------------------------------------------------------

    def table_of(self, prompts: Sequence[int]) -> pa.Table:
        """Return the rows of these prompts that can be drawn."""
        places_N, _ = self.places(prompts)
        rows = self.rows.rows_at(places_N)
        prompts_U, named_N = np.unique(rows["prompt"], return_inverse=True)
        shards_U, rows["shard"] = np.unique(rows["shard"], return_inverse=True)
        versions_U, rows["version"] = np.unique(rows["version"], return_inverse=True)
        names = pa.array([self.prompt_ids[prompt] for prompt in prompts_U.tolist()], pa.string())
        shared = _Shared(names, self.shards.rows_at(shards_U), self.versions.rows_at(versions_U))
        return pa.Table.from_batches([_batch(rows, places_N, named_N, shared)])

    def table(self) -> pa.Table:
        """Return all rows, including those that cannot be drawn. Most columns are not copied."""
        shared = _Shared(
            pa.array(self.prompt_ids, pa.string()),
            self.shards.rows_at(np.arange(len(self.shards))),
            self.versions.rows_at(np.arange(len(self.versions))),
        )
        first, batches = 0, []
        for rows in self.rows.filled():
            places_N = np.arange(first, first + len(rows["prompt"]))
            batches.append(_batch(rows, places_N, rows["prompt"], shared))
            first += len(places_N)
        return pa.Table.from_batches(batches)


class _Shared(NamedTuple):
    """Values that many rows share. Each is stored once."""

    prompt_ids: pa.Array
    shards: Columns
    versions: Columns


def _batch(rows: Columns, places_N: np.ndarray, named_N: np.ndarray, shared: _Shared) -> pa.RecordBatch:
    """Return rows in the form of the tables `pool` and `front` of `storage.buffer.sampler`. `named_N` has, for each
    row, the place of its prompt in `prompt_ids`."""
    content = pa.py_buffer(np.ascontiguousarray(rows["content"]).view(np.uint8))
    content_N = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(places_N), [None, content])
    columns = {
        "searcher": _placed(rows["shard"], shared.shards["searcher"]),
        "seq": _placed(rows["shard"], shared.shards["seq"]),
        "row": rows["row"],
        "prompt_id": _placed(named_N, shared.prompt_ids),
        "prompt": rows["prompt"],
        "content": pa.ExtensionArray.from_storage(pa.uuid(), content_N),
        "ord": places_N.astype(np.int64),
        "sync": _placed(rows["shard"], shared.shards["sync"]),
        "reward": rows["reward"],
        "length": rows["length"],
        "finished": rows["finished"],
        "version_start": _placed(rows["version"], shared.versions["number"]),
        "version_start_attempt": _placed(rows["version"], shared.versions["attempt"]),
        "version_step": _placed(rows["version"], shared.versions["step"]),
        "drawable": rows["drawable"],
    }
    return pa.record_batch(list(map(pa.array, columns.values())), list(columns))


def _placed(places_N: np.ndarray, values: np.ndarray | pa.Array) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(places_N.astype(np.int32, copy=False)), pa.array(values), safe=False)
