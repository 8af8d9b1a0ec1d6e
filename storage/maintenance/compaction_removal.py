"""Removes objects whose rows lie in a compaction: shards, and compactions that another compaction of higher rank
replaces."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from storage import layout
from storage.log.compactions import Compaction, Compactions
from storage.log.shard_reader import SIDE_BY_SIDE
from storage.maintenance.compaction_reader import CompactionReader
from storage.runs.run import Run
from tba.errors import Damaged, Missing


class CompactionRemoval:
    """Removes the run's own shards and compactions that are no longer read. Before an object is removed, the
    compactions that hold its rows are read whole."""

    def __init__(self, run: Run, compactions: Compactions, sources: CompactionReader):
        self.shards = 0  # number of the run's own shards that lie in compactions
        self.removed = 0  # number of removed objects
        self.left: dict[str, str] = {}  # by key of an object that stays: the reason
        self._run, self._compactions, self._sources = run, compactions, sources

    def remove(self) -> None:
        stored = {entry.key for entry in self._run.own.list(layout.TRAJECTORIES)}
        shared = self._run.inherits
        own = [
            compaction for compaction in self._compactions.look() if not (shared and shared.inherits(compaction.object))
        ]
        holders = {compaction.object: self._holders(compaction) for compaction in own}
        for compaction in own:
            mine = [key for key, holder in holders[compaction.object] if holder == compaction]
            self.shards += len(mine)
            self._remove_all([key for key in mine if key in stored], [compaction])
        for compaction in own:
            others = {holder.object: holder for _, holder in holders[compaction.object]}
            if compaction.object not in others:
                self._remove_all([compaction.record], list(others.values()))
                self._remove_all([compaction.object], list(others.values()))

    def _holders(self, compaction: Compaction) -> list[tuple[str, Compaction]]:
        """Return the key of each shard of a compaction, and the compaction from which readers read that shard."""
        places = [(part.shard.key, self._compactions.place(part.shard)) for part in compaction.parts]
        return [(key, place.compaction) for key, place in places if place]

    def _remove_all(self, keys: Sequence[str], held_by: Sequence[Compaction]) -> None:
        if not keys:
            return
        for compaction in held_by:
            try:
                self._sources.check_whole(compaction)
            except (Missing, Damaged) as error:
                self.left.update(dict.fromkeys(keys, str(error).splitlines()[0]))
                return
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(self._run.store.delete, keys))
        self.removed += len(keys)
