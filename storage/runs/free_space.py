"""Free space on the disks that a role writes to."""

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TypedDict

from storage import layout
from storage.local_files.shared_cache import cache_folder
from storage.runs.run import Run
from tba.errors import StorageError

log = logging.getLogger(__name__)


class Disk(TypedDict, total=False):
    """The fields of a lease that describe the fullest disk."""

    disk_gb: float
    disk: str


def fullest_disk(run: Run) -> Disk:
    """Return the free space of the fullest disk that the role writes to, and a folder on it. These disks hold the run
    (if it is not remote), the cache, and temporary files. If the free space cannot be found out, log the error and
    return an empty dict."""
    try:
        record = run.store.local_path(layout.RUN)
        folders = [cache_folder(""), Path(tempfile.gettempdir()), *([record.parent] if record else [])]
        free, folder = min((shutil.disk_usage(folder).free, str(folder)) for folder in folders)
    except (OSError, StorageError) as error:
        log.debug("the free space of disks is unknown: %s", error)
        return {}
    return {"disk_gb": round(free / 1e9, 3), "disk": folder}
