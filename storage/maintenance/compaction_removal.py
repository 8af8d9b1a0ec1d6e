"""Removes what a compaction of higher rank holds: shards, and other compactions with their records."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from storage import layout
from storage.log.compactions import Compaction, Compactions
from storage.log.shard_reader import SIDE_BY_SIDE
from storage.maintenance.compaction_sources import CompactionSources
from storage.runs.run import Run
from tba.errors import Damaged, Missing


class CompactionRemoval:
    """Removes nothing before the compactions that hold it have been read whole."""

    def __init__(self, run: Run, compactions: Compactions, sources: CompactionSources):
        self.shards = 0  # that lie in compactions
        self.removed = 0  # objects
        self.left: dict[str, str] = {}  # objects that stay, and why
        self._run, self._compactions, self._sources = run, compactions, sources

    def remove(self) -> None:
        stored = {entry.key for entry in self._run.own.list(layout.TRAJECTORIES)}
        found = self._compactions.look()
        shared = self._run.inherits
        own = [it for it in found if not (shared and shared.inherits(it.object))]
        holders = {it.object: self._holders(it) for it in own}
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
        """Return the key of each of its shards, with the compaction that counts for it."""
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
