"""Where a run started by a worker finds relative paths: the pull step of prefect.yaml."""

import os
from pathlib import Path

# Bound before the folder changes: Prefect imports flows with the working directory first on the path, and a project's
# own `flows` or `storage` folder there must not be taken for ours.
import storage as _storage  # noqa: F401
import tba as _tba  # noqa: F401
from flows.planning.resolve import is_temporary
from tba.errors import ConfigError


def leave_temporary_folder() -> dict[str, str]:
    """A process worker starts each run in an empty temporary folder and removes that afterwards; runs stored there
    would be lost. Go to `$TBA_HOME`, else to where the worker was started. Anywhere else nothing is done: a work pool
    may have chosen the folder, and the worker itself passes through here too."""
    home = os.environ.get("TBA_HOME")
    if home and not Path(home).is_dir():
        raise ConfigError(f"TBA_HOME: {home!r} is not a folder")
    home = home or os.environ.get("PWD", "")  # which the shell that started the worker has set
    if is_temporary(Path.cwd()) and home and Path(home).is_dir():
        os.chdir(home)
    return {"directory": os.getcwd()}
