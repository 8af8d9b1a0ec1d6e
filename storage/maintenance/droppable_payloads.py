"""The payloads of rows that no step will draw again: which they are, and the record that gives them up."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from storage import layout
from storage.buffer.index import Index
from storage.buffer.settings import NoDraws
from storage.log.compactions import PAYLOAD, Compactions
from storage.log.schema import COLUMNS
from storage.log.shard_reader import ShardReader
from storage.log.syncs import Shard, SyncRecord
from storage.maintenance.compaction_format import Admitted
from storage.objects import manifest_folders
from storage.runs import forks, retention
from storage.runs.retention import GivenUpPayloads
from storage.runs.run import Run
from tba.types import Eligibility, Version

_WORTH = 0.25  # of a compaction's payloads: the least for which it is written anew


class DroppablePayloads:
    """Rows whose payloads can be dropped: no rows until `choose` finds some."""

    def __init__(self, run: Run, compactions: Compactions):
        self.record: int | None = None  # the retention record that gives them up
        self.forks: list[str] = []  # that may draw what no step of the run can
        self._run, self._compactions = run, compactions
        self._drawable: dict[str, np.ndarray] = {}  # by key of the shards that may lose payloads: which rows may not
        self._payloads: GivenUpPayloads | None = None

    def choose(self, synced: Sequence[SyncRecord], checkpoint: Version, eligibility: Eligibility) -> None:
        """Choose the rows that no step after the checkpoint can draw: the index says so, as it is then. Damaged if
        nobody could go on from there, and steps would have to be taken from further back again."""
        manifest_folders.check_sizes(self._run.own, layout.checkpoint(checkpoint))
        self.forks = forks.names(self._run)
        last = [record for record in synced if record.sync <= checkpoint.number]
        parent = self._run.parent
        first = 1 + max(forks.newest_pinned_record(self._run), parent.sync if parent else -1)
        if first > last[-1].sync:
            return
        index, named = _index(self._run, last, eligibility)
        for record in last:
            for shard in record.shards if record.sync >= first else ():
                places = index.shards[named[shard.key]]
                rows = index.pool.rows.take(np.arange(places.start, places.stop), ["drawable"])
                self._drawable[shard.key] = rows["drawable"].astype(bool)
        self._payloads = GivenUpPayloads(
            columns=PAYLOAD,
            first_sync=first,
            last_sync=last[-1].sync,
            step=last[-1].step,
            eligibility=eligibility,
        )

    def count(self, shard: Shard) -> int:
        """Return how many rows of a shard have a payload that nobody needs."""
        drawable_B = self._drawable.get(shard.key)
        place = self._compactions.place(shard)
        known = place.part.given_up if place else 0
        return 0 if drawable_B is None else max(0, int((~drawable_B).sum()) - known)

    def are_worth_it(self, shards: Sequence[Shard]) -> bool:
        """Return True if enough payloads can be dropped that the shards are written anew for it."""
        places = [self._compactions.place(shard) for shard in shards]
        left = sum(shard.rows - (it.part.given_up if it else 0) for shard, it in zip(shards, places, strict=True))
        number = sum(map(self.count, shards))
        return number > 0 and number >= _WORTH * left

    def give_up(self, groups: Sequence[Sequence[Admitted]]) -> None:
        """Write the record before anything is done, and then look at the forks again: whoever makes one registers it
        and then looks for what has been given up, so that one of the two sees the other."""
        if self._payloads is None or not any(self.count(it.shard) for group in groups for it in group):
            self._drawable = {}
            return
        said = [it for it in retention.given_up_payloads(self._run) if it.payloads == self._payloads]
        why = f"payloads that no step after {self._payloads.step} can draw"
        self.record = said[0].number if said else retention.give_up(self._run, why=why, payloads=self._payloads)
        pinned = forks.newest_pinned_record(self._run)
        for group in groups:
            for it in group:
                if it.sync <= pinned:
                    self._drawable.pop(it.shard.key, None)

    def records_about(self, shards: Iterable[Shard]) -> set[int]:
        """Return the record that gives payloads up, if it speaks of any of these shards."""
        return {self.record} if self.record and any(shard.key in self._drawable for shard in shards) else set()

    def without(self, shard: Shard, table: pa.Table) -> pa.Table:
        """Return the rows of a shard without the payloads that nobody needs."""
        drawable_B = self._drawable.get(shard.key)
        if drawable_B is None or drawable_B.all():
            return table
        rows = pa.array(np.arange(len(table)), mask=~drawable_B)
        for name in PAYLOAD:
            column = table[name].combine_chunks().take(rows)
            table = table.set_column(table.column_names.index(name), table.schema.field(name), column)
        return table


def _index(run: Run, synced: Sequence[SyncRecord], eligibility: Eligibility) -> tuple[Index, Mapping[str, str]]:
    """Return the index after these records, and the names by which it knows shards. Nothing is drawn from it."""
    steps = {record.sync: record.step for record in synced}
    undrawn = NoDraws(eligibility)
    index = Index(
        run.sampler_sql,
        seed=0,
        sampling=undrawn,
        training=undrawn,
        step_of_version=lambda version: steps[version.number],
    )
    reader = ShardReader(run, disk_bytes=0)
    named = {shard.key: f"{shard.searcher}/{shard.seq}" for record in synced for shard in record.shards}
    for record in synced:
        ordered = sorted(record.shards, key=lambda shard: (shard.searcher, shard.seq))
        light = [(named[shard.key], table) for shard, table in reader.light(ordered, COLUMNS)]
        index.extend(record.sync, light, step=record.step)
    return index, named
