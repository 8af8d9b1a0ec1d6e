"""Check the place that a setting names for a model: a folder, a GGUF file, or a name on the hub."""

import re
from pathlib import Path

from tba.errors import ConfigError
from tba.models.gguf_files import find_gguf, is_gguf

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_place(setting: str, place: str) -> None:
    """Raise ConfigError, naming the setting, unless a place is a folder or a GGUF file on this machine, or has the form
    of a name on the hub. The hub is not asked whether the name exists. URLs must not be passed."""
    path = Path(place)
    if is_gguf(place):
        find_gguf(setting, place)
    elif not path.is_dir() and (path.exists() or not _NAME.fullmatch(place)):
        raise ConfigError(f"{setting} must be an existing folder, a GGUF file or a name on the hub, got {place!r}")
