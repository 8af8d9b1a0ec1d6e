"""The context that all checkers of one check share: the run, its listing, its readers, and the findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from storage import layout
from storage.log.compactions import is_record
from storage.maintenance.check.findings import FindingsLog
from storage.maintenance.check.record_digests import RecordDigests
from storage.maintenance.check.relations import Relations
from storage.maintenance.read_ahead import ReadAhead
from storage.objects.store import Entry
from storage.queries.mirror import Progress
from storage.runs.run import Run

FOLDERS = (
    layout.EVALUATIONS, layout.CHECKPOINTS, layout.VERSIONS, layout.LEDGER, layout.STEPS, layout.DRAWS, layout.SYNCS,
    layout.TRAJECTORIES, layout.COMPACTIONS, layout.PROMPTS, layout.ARITHMETIC, layout.ATTEMPTS, layout.RETENTION,
    layout.EVENTS, layout.RENDEZVOUS, layout.ROLES, layout.FORKS,
)  # fmt: skip
"""The folders of a run in the order in which they are listed. An object that refers to others is listed before them. So
an object that a live run writes during the listing is never reported as missing."""

Listing = Mapping[str, Mapping[str, Entry]]
"""For each folder, the entries of its objects by key, in the order of the keys."""


@dataclass(frozen=True)
class CheckContext:
    run: Run
    listed: Listing  # the objects that were there when the check began
    strangers: Sequence[str]  # keys of objects in the run's folder that are not part of a run
    reading: ReadAhead  # reads objects that are not records
    records: RecordDigests  # reads records
    findings: FindingsLog
    relations: Relations  # the rows that must agree with each other

    @classmethod
    def of(cls, run: Run, progress: Progress) -> Self:
        """Return the context for a check of this run. The folders are listed here, once and in the order of
        `FOLDERS`."""
        listed = {
            folder: {entry.key: entry for entry in run.store.list(folder) if layout.is_part(entry.key)}
            for folder in FOLDERS
        }
        strangers = [entry.key for entry in run.store.list() if not layout.is_part(entry.key)]
        reading = ReadAhead(run.store, [list(filter(_is_read_whole, found.values())) for found in listed.values()])
        training = run.config.get("training", {})
        return cls(
            run=run,
            listed=listed,
            strangers=strangers,
            reading=reading,
            records=RecordDigests(run, reading),
            findings=FindingsLog(run.name, run.store.url, total=_size(listed), progress=progress),
            relations=Relations(slots=training.get("prompts_per_step"), responses=training.get("responses_per_prompt")),
        )

    def is_inherited(self, key: str) -> bool:
        """True if the run is a fork and inherits the object. The check of its parent then covers the object."""
        return self.run.owner_of(key) is not self.run


def _is_read_whole(entry: Entry) -> bool:
    """True unless the object is a file of a version or checkpoint, or the object of a compaction. Those are read in
    other ways."""
    is_file = layout.parse_folder(entry.key) and not _is_manifest(entry.key)
    return not is_file and (layout.parse_compaction(entry.key) is None or is_record(entry.key))


def _size(listed: Listing) -> int:
    """Return the number of objects to check. A folder with a manifest counts as one object."""
    return sum(len(list(filter(_is_manifest, found))) or len(found) for found in listed.values())


def _is_manifest(key: str) -> bool:
    return key.endswith(f"/{layout.MANIFEST}")
