"""The pull step of prefect.yaml: set the working directory of a flow run that a worker starts."""

import os
from pathlib import Path

# These packages are imported before the working directory changes. Prefect imports flows with the working directory
# first on the path, and a folder `flows` or `storage` of the user's project must not be imported instead of ours.
import storage as _storage  # noqa: F401
import tba as _tba  # noqa: F401
from flows.planning.resolve import is_temporary
from tba.errors import ConfigError


def leave_temporary_folder() -> dict[str, str]:
    """Change from the temporary folder of a flow run to `$TBA_HOME`, or else to the folder where the worker was
    started. A process worker starts each flow run in an empty temporary folder and removes it afterwards, so runs
    stored there would be lost. In any other folder do nothing: the work pool may have chosen that folder, and the
    worker itself calls this function too."""
    home = os.environ.get("TBA_HOME")
    if home and not Path(home).is_dir():
        raise ConfigError(f"TBA_HOME: {home!r} is not a folder")
    home = home or os.environ.get("PWD", "")  # set by the shell that started the worker
    if is_temporary(Path.cwd()) and home and Path(home).is_dir():
        os.chdir(home)
    return {"directory": os.getcwd()}
