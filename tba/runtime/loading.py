"""Load a user's class, which a setting names by its path, such as `package.module:Class`."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tba.errors import ConfigError


def load_class(setting: str, path: str, load: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """Return the class at a path, or the result of `load` if this function is passed. Raise ConfigError, which names
    the setting, if the class cannot be loaded."""
    search_working_folder()
    try:
        loaded = load() if load else class_at(path)
    except Exception as error:  # a module runs when it is imported, and may raise anything
        raise ConfigError(
            f"{setting}: {path!r} cannot be loaded: {type(error).__name__}: {error}; its module must be installed, "
            f"or be in the working folder {os.getcwd()}"
        ) from error
    if not callable(loaded):
        raise ConfigError(f"{setting}: {path!r} is {loaded!r}, not a class")
    return loaded


def search_working_folder() -> None:
    """Let imports search the working folder too, as `python -m` does."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def class_at(path: str) -> Any:
    """Import a class by its path."""
    module, _, name = path.replace(":", ".").rpartition(".")
    return getattr(import_module(module), name)
