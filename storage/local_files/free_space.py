"""Free space on the disks that a role writes to."""

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TypedDict

from storage.local_files.shared_cache import cache_folder
from tba.errors import StorageError

log = logging.getLogger(__name__)


class Disk(TypedDict, total=False):
    """The fields of a lease that describe the fullest disk."""

    disk_gb: float
    disk: str


def fullest_disk(folder: Path | None) -> Disk:
    """Return the free space of the fullest disk that a role writes to, and a folder on this disk. These disks hold
    `folder`, which is that of a run unless the run is remote, the cache, and temporary files. If the free space cannot
    be found out, log the error and return an empty dict."""
    try:
        folders = [cache_folder(""), Path(tempfile.gettempdir()), *([folder] if folder else [])]
        free, fullest = min((shutil.disk_usage(it).free, str(it)) for it in folders)
    except (OSError, StorageError) as error:
        log.debug("the free space of disks is unknown: %s", error)
        return {}
    return {"disk_gb": round(free / 1e9, 3), "disk": fullest}
