"""Remove what killed writers have left in a run: half-written files, and uploads that were never completed."""

import logging

from storage.local_files.temporary_files import A_DAY
from storage.runs.events import Events
from storage.runs.run import Run
from tba.errors import StorageError

log = logging.getLogger(__name__)

SWEPT = "swept"
"""The kind of event that tells what was removed."""
_NAMED = 20  # keys that the event lists


def sweep(run: Run, events: Events, prefix: str = "") -> None:
    """Free what unfinished writes under a folder of the run hold, a day after their last sign of life. An event tells
    how many keys there were, and the first of them. Trouble with the store is logged: the next life sweeps again."""
    try:
        keys = run.own.discard_older(prefix, A_DAY)
    except StorageError as error:
        log.warning("what killed writers have left in %s/%s is not removed: %s", run.url, prefix, error)
        return
    if keys:
        told = f"unfinished writes of {len(keys)} objects, older than a day, were removed: {', '.join(keys[:3])}"
        events.write(SWEPT, told + (" and the like" if len(keys) > 3 else ""), number=len(keys), keys=keys[:_NAMED])
