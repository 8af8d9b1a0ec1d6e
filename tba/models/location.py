"""Check the place that a setting names for a model: a folder, or a name on the hub."""

import re
from pathlib import Path

from tba.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_place(setting: str, place: str) -> None:
    """Raise ConfigError, naming the setting, unless a place is a folder on this machine or has the form of a name on
    the hub. The hub is not asked whether the name exists. URLs must not be passed."""
    path = Path(place)
    if not path.is_dir() and (path.exists() or not _NAME.fullmatch(place)):
        raise ConfigError(f"{setting} must be an existing folder or a name on the hub, got {place!r}")
