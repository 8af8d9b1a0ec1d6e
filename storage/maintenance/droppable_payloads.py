"""Finds the payloads of rows that no gradient step will draw again, and writes the retention record that gives them
up."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from storage import layout
from storage.buffer.index import Index
from storage.buffer.settings import NoDraws
from storage.log.compactions import PAYLOAD, Compactions
from storage.log.schema import COLUMNS
from storage.log.shard_reader import ShardReader
from storage.log.sync_records import Shard, SyncRecord
from storage.maintenance.compaction_format import Admitted
from storage.objects import manifest_folders
from storage.runs import forks, retention
from storage.runs.retention import GivenUpPayloads
from storage.runs.run import Run
from tba.types import Eligibility, Version

_WORTH = 0.25  # share of the payloads of a compaction that must be droppable before it is written again


class DroppablePayloads:
    """The rows whose payloads can be dropped. There are none before `choose` is called."""

    def __init__(self, run: Run, compactions: Compactions):
        self.record: int | None = None  # number of the retention record that gives the payloads up
        self.forks: list[str] = []  # forks: they may draw rows that no step of this run can draw
        self._run, self._compactions = run, compactions
        self._drawable: dict[str, np.ndarray] = {}  # by key of a shard that may lose payloads: which rows keep theirs
        self._payloads: GivenUpPayloads | None = None

    def choose(self, synced: Sequence[SyncRecord], checkpoint: Version, eligibility: Eligibility) -> None:
        """Choose the rows that no gradient step after the checkpoint can draw, according to the index at the
        checkpoint. Rows that this run inherits, or that a fork may draw, are not chosen. Raise Damaged if the
        checkpoint is damaged: a trainer would then continue from an older checkpoint, whose next steps may draw these
        rows."""
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
                rows = index.pool.rows.rows_at(np.arange(places.start, places.stop), ["drawable"])
                self._drawable[shard.key] = rows["drawable"].astype(bool)
        self._payloads = GivenUpPayloads(
            columns=PAYLOAD,
            first_sync=first,
            last_sync=last[-1].sync,
            step=last[-1].step,
            eligibility=eligibility,
        )

    def count(self, shard: Shard) -> int:
        """Return how many rows of a shard still have a payload that can be dropped."""
        drawable_B = self._drawable.get(shard.key)
        place = self._compactions.place(shard)
        known = place.part.given_up if place else 0
        return 0 if drawable_B is None else max(0, int((~drawable_B).sum()) - known)

    def are_worth_it(self, shards: Sequence[Shard]) -> bool:
        """True if enough payloads of these shards can be dropped to justify writing the shards again."""
        places = [self._compactions.place(shard) for shard in shards]
        left = sum(shard.rows for shard in shards) - sum(place.part.given_up for place in places if place)
        number = sum(map(self.count, shards))
        return number > 0 and number >= _WORTH * left

    def give_up(self, groups: Sequence[Sequence[Admitted]]) -> None:
        """Write the retention record that gives the payloads up, before any is dropped; use an equal record if there is
        one. Then look at the forks again, and keep the payloads that a new fork may need. A process that makes a fork
        first registers the fork and then looks for retention records, so one of the two processes sees what the other
        wrote."""
        if self._payloads is None or not any(self.count(admitted.shard) for group in groups for admitted in group):
            self._drawable = {}
            return
        same = [record for record in retention.given_up_payloads(self._run) if record.payloads == self._payloads]
        why = f"payloads that no step after {self._payloads.step} can draw"
        self.record = same[0].number if same else retention.give_up(self._run, why=why, payloads=self._payloads)
        pinned = forks.newest_pinned_record(self._run)
        for group in groups:
            for admitted in group:
                if admitted.sync <= pinned:
                    self._drawable.pop(admitted.shard.key, None)

    def records_about(self, shards: Iterable[Shard]) -> set[int]:
        """Return the number of the retention record of `give_up` as a set, if it concerns any of these shards;
        otherwise an empty set."""
        return {self.record} if self.record and any(shard.key in self._drawable for shard in shards) else set()

    def without(self, shard: Shard, table: pa.Table) -> pa.Table:
        """Return the rows of a shard, with the payloads that can be dropped replaced by nulls."""
        drawable_B = self._drawable.get(shard.key)
        if drawable_B is None or drawable_B.all():
            return table
        rows = pa.array(np.arange(len(table)), mask=~drawable_B)
        for name in PAYLOAD:
            column = table[name].combine_chunks().take(rows)
            table = table.set_column(table.column_names.index(name), table.schema.field(name), column)
        return table


def _index(run: Run, synced: Sequence[SyncRecord], eligibility: Eligibility) -> tuple[Index, Mapping[str, str]]:
    """Return the index after these sync records, and by key of each shard its name in the index."""
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
