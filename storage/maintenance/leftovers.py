"""Removes what killed writers have left in a run: half-written files, and uploads that were never completed."""

import logging

from storage.local_files.temporary_files import A_DAY
from storage.runs.events import Events
from storage.runs.run import Run
from tba.errors import StorageError

log = logging.getLogger(__name__)

SWEPT = "swept"
"""The kind of event that reports what was removed."""
_NAMED = 20  # maximum number of keys that the event lists


def sweep(run: Run, events: Events, prefix: str = "") -> None:
    """Free the space of unfinished writes under a folder of the run that have made no progress for a day. An event
    reports the number of keys and the first of them. An error of the store is only logged, because the role sweeps
    again when it next starts."""
    try:
        keys = run.own.discard_older(prefix, A_DAY)
    except StorageError as error:
        log.warning("unfinished writes of killed processes in %s/%s were not removed: %s", run.url, prefix, error)
        return
    if keys:
        message = f"unfinished writes of {len(keys)} objects, older than a day, were removed: {', '.join(keys[:3])}"
        events.write(SWEPT, message + (", …" if len(keys) > 3 else ""), number=len(keys), keys=keys[:_NAMED])
