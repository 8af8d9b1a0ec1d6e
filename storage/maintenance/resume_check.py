"""Compares what records admit with what is stored, before anything is written on top of damage.

A run goes on only with all that its records admit: a searcher that found the name of a lost shard free, or a trainer
that drew from a buffer with a hole, would replace recorded facts by other ones. `tba resume` looks here first, and so
does the trainer before it claims an attempt.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from storage import layout
from storage.log.compactions import Compactions, Place
from storage.log.prompts import has_prompts, read_prompts
from storage.log.syncs import Shard, read_chain
from storage.queries.mirror import Progress
from storage.runs.retention import given_up
from storage.runs.run import Run
from tba.errors import Damaged, Missing

_THREADS = 4  # that read a disk at the same time


def refuse_damage(run: Run, *, whole: bool, progress: Progress | None = None) -> None:
    """Raise Damaged, with what a person can do, if a shard that records admit or a split of prompts is lost. With
    `whole`, objects on a disk are read and compared with their sha256. Otherwise, and in an object store, sizes are
    compared: the trainer's reader compares the sha256 of each shard that it fetches."""
    _refuse_lost_prompts(run)
    if lost := find_lost(run, whole=whole, progress=progress):
        first, why = next(iter(lost.items()))
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise Damaged(
            f"{run.url} cannot go on: {first}, which its records admit, {why}{more}. Restore what "
            f"`tba check {run.url}` names, or go on without these trajectories: `tba give-up {run.url}`"
        )


def find_lost(run: Run, *, whole: bool, progress: Progress | None = None) -> dict[str, str]:
    """Return what is wrong with each admitted shard that is not as its record says and was not given up, by key.
    `progress` is told how many of how many shards have been compared."""
    return _Admitted(run, whole=whole).find_lost(progress or (lambda done, total: None))


def first_sync(run: Run, keys: Collection[str]) -> int:
    """Return the first sync that admits any of these shards; the next one if none has admitted any yet."""
    records = read_chain(run)
    found = [record.sync for record in records if any(shard.key in keys for shard in record.shards)]
    return min(found, default=len(records))


def _refuse_lost_prompts(run: Run) -> None:
    """Prompts are read as they are stored: what the task would make of its data today may be something else."""
    for split, prefix in (("train", layout.SYNCS), ("test", layout.EVALUATIONS)):
        if has_prompts(run, split):
            read_prompts(run, split)
        elif run.store.list(prefix):
            raise Damaged(f"{run.url} cannot go on: {layout.prompts(split)} is missing; restore it")


def _needed(run: Run) -> list[Shard]:
    """Return the shards that records of the run admit and, in a fork that replays, those that it will admit."""
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
            wrong = dict(pool.map(lambda it: (it.object, self._fault(it.object, it.bytes, it.sha256)), objects))
            faults = pool.map(lambda shard: self._fault_of(shard, wrong), shards)
            for done, (shard, why) in enumerate(zip(shards, faults, strict=True), start=1):
                progress(done, len(shards))
                if why:
                    lost[shard.key] = why
        return lost

    def _fault_of(self, shard: Shard, wrong: dict[str, str]) -> str:
        """Return what is wrong with a shard, wherever it lies; empty if nothing is."""
        place = self.compactions.place(shard)
        why = wrong[place.compaction.object] if place else self._fault(shard.key, shard.bytes, shard.sha256)
        if why and place:
            why = f"lies in {place.compaction.object}, which {why}"
        return why and self._fault_elsewhere(shard, place, why)

    def _fault_elsewhere(self, shard: Shard, known: Place | None, why: str) -> str:
        """Look again where a compaction that is at work may just have moved the shard."""
        place = self.compactions.place_now(shard, known)
        if place is None or place == known:
            return why
        return self._fault(place.compaction.object, place.compaction.bytes, place.compaction.sha256)

    def _fault(self, key: str, size: int, digest: str) -> str:
        """Return what is wrong with an object of this size and sha256; empty if nothing is."""
        if self.whole and self.sizes.get(key) == size:
            try:
                same = sha256(self.store.read(key)).hexdigest() == digest
            except Missing:
                return "is missing"
            return "" if same else "is not what its record says: its sha256 differs"
        if key not in self.sizes:
            return "" if self.store.exists(key) else "is missing"  # a listing may be behind
        return "" if self.sizes[key] == size else f"has {self.sizes[key]} bytes, its record says {size}"
