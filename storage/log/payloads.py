"""Fetches the rows that gradient steps draw. The row groups used most recently stay in memory; others are read from
storage."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from storage.log.schema import TRAJECTORY_SCHEMA, flat
from storage.log.shard_reader import Piece, ShardReader, to_batch
from storage.log.sync_records import Shard
from storage.runs.run import Run
from tba.errors import Missing
from tba.fetched import Fetched, Lists

_DRAWN = ("prompt_id", "prompt_tokens", "response_tokens", "ref_logps", "loss_mask", "reward", "finished")
"""Columns that are read for every drawn row."""
_STEPS = ("step_ends", "step_values")


class Payloads:
    """Fetches trajectories of admitted shards.

    The columns that batches need stay in memory as Arrow batches. The row groups that were used most recently are kept,
    up to `memory_bytes`; during a fetch, all row groups that it uses are kept. With `behaviour`, the log-probabilities
    under the policy that sampled the tokens are fetched too. With `values`, the estimated values of the states between
    the reasoning steps of a response are fetched too. If one of the fetched rows was stored without log-probabilities
    under the reference, none are returned."""

    def __init__(self, run: Run, *, memory_bytes: int, disk_bytes: int, behaviour: bool = False, values: bool = False):
        self.run, self.limit = run, memory_bytes
        names = (*_DRAWN, *(["behaviour_logps"] if behaviour else []), *(_STEPS if values else []))
        self.schema = pa.schema([TRAJECTORY_SCHEMA.field(name) for name in names])
        self.reader = ShardReader(run, disk_bytes=disk_bytes)
        self.nbytes = 0
        self._kept: OrderedDict[str, list[Piece]] = OrderedDict()  # by key of the shard, most recently used last

    def keep(self, shard: Shard, table: pa.Table, data: bytes) -> None:
        """Keep a shard that has just been read and found good: in memory and, if the store is remote, as a copy on
        disk."""
        self.reader.copy(shard, data)
        self._keep(shard.key, [Piece(0, to_batch(table, self.schema.names))])

    def fetch(self, places: Sequence[tuple[Shard, int]]) -> Fetched:
        """Return the trajectories at these places, in the same order. A place is a shard and the number of a row in it.
        Rows that are not in memory are read from storage. Raise Missing if a row does not exist, or if its tokens have
        been given up."""
        used = {shard.key: self._used(shard.key) for shard, _ in places}
        missing: dict[str, tuple[Shard, set[int]]] = {}
        for shard, row in places:
            if not any(piece.holds(row) for piece in used[shard.key]):
                missing.setdefault(shard.key, (shard, set()))[1].add(row)
        for key, pieces in zip(missing, self.reader.pieces(missing.values(), self.schema.names), strict=True):
            used[key] = used[key] + pieces
            self._keep(key, used[key])
        slices = [self._existing_row(used[shard.key], shard, row) for shard, row in places]
        table = pa.Table.from_batches([pa.concat_batches(slices)] if slices else [], self.schema)
        if (tokens := table["response_tokens"]).null_count:
            shard, row = places[tokens.is_null().to_pylist().index(True)]
            raise Missing(f"{self.run.url}/{shard.key}: the tokens of row {row} have been given up on purpose")
        return Fetched(
            trajectory_ids=[f"{shard.searcher}/{shard.seq}/{row}" for shard, row in places],
            prompt_ids=table["prompt_id"].to_pylist(),
            prompt_tokens=flat(table["prompt_tokens"]),
            response_tokens=flat(table["response_tokens"]),
            ref_logps=None if table["ref_logps"].null_count else flat(table["ref_logps"]),
            reward_B=table["reward"].to_numpy(),
            finished_B=table["finished"].to_numpy(),
            behaviour_logps=flat(table["behaviour_logps"]) if "behaviour_logps" in self.schema.names else None,
            loss_mask=_mask(table),
            **{name: flat(table[name]) for name in _STEPS if name in self.schema.names},
        )

    def _existing_row(self, pieces: Sequence[Piece], shard: Shard, row: int) -> pa.RecordBatch:
        batch = _row(pieces, row)
        if batch is None:
            raise Missing(f"{self.run.url}/{shard.key} has {shard.rows} rows, none at {row}")
        return batch

    def _used(self, key: str) -> list[Piece]:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key, [])

    def _keep(self, key: str, pieces: list[Piece]) -> None:
        self.nbytes += _nbytes(pieces) - _nbytes(self._kept.pop(key, []))
        self._kept[key] = pieces
        while self.nbytes > self.limit:
            self.nbytes -= _nbytes(self._kept.popitem(last=False)[1])


def _mask(table: pa.Table) -> Lists | None:
    """Return, for each token of each row, whether the policy wrote it; None if the policy wrote all tokens of all
    rows."""
    column = table["loss_mask"].combine_chunks()
    if column.null_count == len(column):
        return None
    stored_B = column.is_valid().to_numpy(zero_copy_only=False)
    lengths_B = np.where(stored_B, column.value_lengths().fill_null(0), flat(table["response_tokens"]).lengths_B)
    stored_N = np.repeat(stored_B, lengths_B)
    elements_N = np.ones(len(stored_N), bool)
    elements_N[stored_N] = column.flatten().to_numpy(zero_copy_only=False)
    return Lists(elements_N, lengths_B)


def _row(pieces: Sequence[Piece], row: int) -> pa.RecordBatch | None:
    for piece in pieces:
        if piece.holds(row):
            return piece.rows.slice(row - piece.start, 1)
    return None


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.rows.nbytes for piece in pieces)
