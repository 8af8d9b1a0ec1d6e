"""Where a model may lie: in a folder, at a URL, or on the hub under a name."""

import re
from pathlib import Path

from tba.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_place(setting: str, place: str) -> None:
    """That a place which is no URL is a folder of this machine, or may be a name of the hub, which is not asked."""
    path = Path(place)
    if not path.is_dir() and (path.exists() or not _NAME.fullmatch(place)):
        raise ConfigError(f"{setting}: no such folder, and no name of the hub, got {place!r}")
