"""A cache on this machine's disk: copies that can be had again, shared by processes and by runs."""

import os
from pathlib import Path

from tba.errors import StorageError


def cache_folder(kind: str) -> Path:
    """The folder for one kind of copy, under `$TBA_CACHE`, else `~/.cache/tba`. Made if it is not there."""
    folder = Path(os.environ.get("TBA_CACHE") or "~/.cache/tba").expanduser().absolute() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the cache folder {folder} cannot be made (set TBA_CACHE): {error.strerror}") from error
    return folder
