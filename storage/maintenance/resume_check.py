"""Compares the shards and prompts that a run needs with those that are stored, before the run continues.

A run may continue only with all shards that its sync records admit. Otherwise a searcher could reuse the name of a lost
shard, or a trainer could draw from an incomplete replay buffer, and so contradict the records. `tba resume` makes this
check first, and so does the trainer before it claims an attempt.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from storage import layout
from storage.log.compactions import Compaction, Compactions, Place
from storage.log.prompts import has_prompts, read_prompts
from storage.log.sync_records import Shard, read_chain
from storage.queries.mirror import Progress
from storage.runs.retention import given_up
from storage.runs.run import Run
from tba.errors import Damaged, Missing

_THREADS = 4  # number of threads that read a disk at the same time


def refuse_damage(run: Run, *, whole: bool, progress: Progress | None = None) -> None:
    """Raise Damaged, and say what the user can do, if an admitted shard or a split of prompts is lost. With `whole`,
    objects on a disk are read and compared with their sha256. Otherwise, and in an object store, only their sizes are
    compared; the trainer verifies what it reads (storage/log/shard_reader.py)."""
    _refuse_lost_prompts(run)
    if lost := find_lost(run, whole=whole, progress=progress):
        first, why = next(iter(lost.items()))
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise Damaged(
            f"{run.url} cannot go on: {first}, which its records admit, {why}{more}. Restore the objects that "
            f"`tba check {run.url}` names, or go on without these trajectories: `tba give-up {run.url}`"
        )


def find_lost(run: Run, *, whole: bool, progress: Progress | None = None) -> dict[str, str]:
    """Return, by key, what is wrong with each admitted shard that does not match its sync record and was not given up.
    `progress` is called with the number of shards compared so far and the number of all shards."""
    return _Admitted(run, whole=whole).find_lost(progress or (lambda done, total: None))


def first_sync(run: Run, keys: Collection[str]) -> int:
    """Return the first sync whose record admits any of these shards. If no record admits any, return the next sync."""
    records = read_chain(run)
    syncs = [record.sync for record in records if any(shard.key in keys for shard in record.shards)]
    return min(syncs, default=len(records))


def _refuse_lost_prompts(run: Run) -> None:
    """Raise Damaged if a needed split of prompts is missing or damaged. Stored prompts cannot be made again, because
    today the task might make other prompts from its data."""
    for split, prefix in (("train", layout.SYNCS), ("test", layout.EVALUATIONS)):
        if has_prompts(run, split):
            read_prompts(run, split)
        elif run.store.list(prefix):
            raise Damaged(f"{run.url} cannot go on: {layout.prompts(split)} is missing; restore it")


def _needed(run: Run) -> list[Shard]:
    """Return the shards that the run's sync records admit and, for a replay, those that its future records will
    admit."""
    records = read_chain(run)
    if run.older and run.inherits and run.inherits.replays:
        newest = run.inherits.origin.newest_record
        records += [record for record in read_chain(run.older) if record.sync <= newest]
    return list({shard.key: shard for record in records for shard in record.shards}.values())


class _Admitted:
    def __init__(self, run: Run, *, whole: bool):
        self.run, self.store = run, run.store
        self.whole = whole and run.store.local_path(layout.TRAJECTORIES[:-1]) is not None
        lost = given_up(run).shards
        self.shards = [shard for shard in _needed(run) if shard.key not in lost]
        self.sizes = {
            entry.key: entry.size
            for prefix in (layout.TRAJECTORIES, layout.COMPACTIONS)
            for entry in run.store.list(prefix)
        }
        self.compactions = Compactions(run)
        self.compactions.look()

    def find_lost(self, progress: Progress) -> dict[str, str]:
        shards, lost = self.shards, dict[str, str]()
        with ThreadPoolExecutor(_THREADS) as pool:
            places = filter(None, map(self.compactions.place, shards))
            objects = {place.compaction.object: place.compaction for place in places}.values()
            wrong = dict(pool.map(lambda made: (made.object, self._fault_of_object(made)), objects))
            faults = pool.map(lambda shard: self._fault_of(shard, wrong), shards)
            for done, (shard, why) in enumerate(zip(shards, faults, strict=True), start=1):
                progress(done, len(shards))
                if why:
                    lost[shard.key] = why
        return lost

    def _fault_of_object(self, compaction: Compaction) -> str:
        return self._fault(compaction.object, compaction.bytes, compaction.sha256)

    def _fault_of(self, shard: Shard, wrong: dict[str, str]) -> str:
        """Return what is wrong with a shard, which lies in an object of its own or in a compaction. Return an empty
        string if nothing is. `wrong` has the faults of compactions."""
        place = self.compactions.place(shard)
        why = wrong[place.compaction.object] if place else self._fault(shard.key, shard.bytes, shard.sha256)
        if why and place:
            why = f"lies in {place.compaction.object}, which {why}"
        return why and self._fault_elsewhere(shard, place, why)

    def _fault_elsewhere(self, shard: Shard, known: Place | None, why: str) -> str:
        """Return what is wrong with a shard at its new place, because a running compaction may just have moved it. If
        it was not moved, return `why`."""
        place = self.compactions.place_now(shard, known)
        if place is None or place == known:
            return why
        return self._fault_of_object(place.compaction)

    def _fault(self, key: str, size: int, digest: str) -> str:
        """Return what is wrong with an object, or an empty string. Compare its size in the listing with `size` and, if
        `whole` is set and the run is local, its sha256 with `digest`. An object that is not in the listing only has to
        exist."""
        if self.whole and self.sizes.get(key) == size:
            try:
                same = sha256(self.store.read(key)).hexdigest() == digest
            except Missing:
                return "is missing"
            return "" if same else "is not what its record says: its sha256 differs"
        if key not in self.sizes:
            return "" if self.store.exists(key) else "is missing"  # the listing may be behind
        return "" if self.sizes[key] == size else f"has {self.sizes[key]} bytes, but its record says {size}"
