"""Find a GGUF file that a setting names, and read its header: the model's sizes, before any weights are read.

This module does not import torch, so that a command that starts a run can use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.models.folder import check_length
from tba.runtime.installed_packages import find_in_package, is_in_package

ENDING = ".gguf"


@dataclass(frozen=True)
class Header:
    """The sizes of a model in a GGUF file."""

    sizes: Mapping[str, int]
    """Number of elements of each tensor, by its name."""
    context: int
    hidden: int
    intermediate: int
    splitting: str
    """Name of the rule by which texts are split before byte-pair encoding, empty if the file names none."""


def is_gguf(place: str) -> bool:
    """Return True if a place names a GGUF file and not a folder. The file may be missing."""
    return place.endswith(ENDING) and (is_in_package(place) or not Path(place).is_dir())


def find_gguf(setting: str, place: str) -> Path:
    """Return the GGUF file at a place: a path, or `package:NAME/FILE` for a file in an installed package. Raise
    ConfigError, naming the setting, if there is no such file, or if what is needed to read it is not installed."""
    path = find_in_package(setting, place) if is_in_package(place) else Path(place)
    if path.suffix != ENDING or not path.is_file():
        raise ConfigError(f"{setting} must name an existing {ENDING} file, got {place!r}")
    if find_spec("gguf") is None:
        raise ConfigError(f"{setting}: {place!r} is read with the package gguf: python -m pip install 'gguf>=0.19'")
    return path


def check_gguf(setting: str, place: str, *, longest: int) -> None:
    """Raise ConfigError, naming the setting, if a GGUF file is damaged or its model cannot read `longest` tokens."""
    header = read_header(setting, find_gguf(setting, place))
    check_length({"max_position_embeddings": header.context}, longest)


def read_header(setting: str, file: Path) -> Header:
    """Return the header of a GGUF file. Raise ConfigError, naming the setting, if the file cannot be read."""
    return _read(setting, file, file.stat().st_mtime_ns)


@lru_cache(maxsize=4)  # reading a vocabulary takes seconds
def _read(setting: str, file: Path, changed: int) -> Header:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        sizes = {tensor.name: prod(map(int, tensor.shape)) for tensor in reader.tensors}
        kind = _field(reader, "general.architecture")
        names = ("context_length", "embedding_length", "feed_forward_length")
        context, hidden, intermediate = (int(_field(reader, f"{kind}.{name}")) for name in names)
        rule = reader.get_field("tokenizer.ggml.pre")
        splitting = rule.contents() if rule else ""
    except Exception as error:  # the reader of a damaged file may raise anything
        raise ConfigError(
            f"{setting}: {str(file)!r} is damaged, or is not the GGUF file of a language model: {error!r:.200}"
        ) from error
    return Header(sizes, context, hidden, intermediate, splitting)


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"its header has no {name}")
    return field.contents()
