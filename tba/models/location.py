"""Check the place that a setting names for a model: a folder, also inside an installed package, a GGUF file, or a name
on the hub."""

import re
from pathlib import Path

from tba.errors import ConfigError
from tba.models.gguf_files import find_gguf, is_gguf
from tba.runtime.installed_packages import find_in_package, is_in_package

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_place(setting: str, place: str) -> None:
    """Raise ConfigError, naming the setting, unless a place is a folder or a GGUF file on this machine, or has the form
    of a name on the hub. The hub is not asked whether the name exists. URLs must not be passed."""
    if is_gguf(place):
        find_gguf(setting, place)
        return
    path = local_path(setting, place)
    is_name = _NAME.fullmatch(place) and not path.exists()
    if not path.is_dir() and not is_name:
        raise ConfigError(f"{setting} must be an existing folder, a GGUF file or a name on the hub, got {place!r}")


def local_path(setting: str, place: str) -> Path:
    """Return the path of a place inside an installed package. Return any other place as a path, which does not exist if
    the place is a name on the hub."""
    return find_in_package(setting, place) if is_in_package(place) else Path(place)
